"""Counts compilations of the whole process, by jax's own monitoring events.

Nothing an engine does can hide from it: a stray `jit` in a host path counts like a step. Tests and the
`jaxserve:compiles_total` metric read it.
"""

from __future__ import annotations

import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number of backend compilations (or persistent-cache loads) since the process began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_s: float, **_: object) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        """Compilations so far."""
        return self._count


COMPILES = CompileCounter()
"""The process's counter; importing it starts counting."""
