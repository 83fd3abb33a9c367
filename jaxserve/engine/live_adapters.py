"""LiveAdapters: the LoRA adapters of an engine that has a thread of its own, for the other threads."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.core import Adapter
from jaxserve.engine.adapters import Adapters

_LOOK_S = 0.2


class LiveAdapters:
    """Loads, and waits until the engine's thread has placed what was loaded.

    Args:
      adapters: the engine's.
      check: raises unless the engine takes requests.
      wake: has the engine look for work.
    """

    def __init__(self, adapters: Adapters, check: Callable[[], None], wake: Callable[[], None]) -> None:
        self._adapters = adapters
        self._check = check
        self._wake = wake

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """Those that requests may name."""
        return self._adapters.listed

    def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter and waits until requests may name it; not on an event loop.

        Raises:
          As `Adapters.load`; NotReadyError, RejectedError or EngineDeadError of the engine's state.
        """
        self._check()
        placed = self._adapters.load(name, path)
        self._wake()
        while True:
            try:
                return placed.result(timeout=_LOOK_S)
            except TimeoutError:
                self._check()

    def unload(self, name: str) -> None:
        """Refuses requests for an adapter from now on; see `Adapters.unload`."""
        self._adapters.unload(name)
