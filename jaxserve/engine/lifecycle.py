"""Lifecycle: the state of an engine that has a thread of its own, as its fronts and every probe see it.

    loading ─▶ warming_up ─▶ ready ◀──▶ stuck        a step takes too long, and comes back after all
                               └──┬──────┘
                                  ▼
                               draining ─▶ stopped
    dead   from anywhere, and for ever

Reading it takes no lock and waits for nobody: a probe is answered whatever the engine's thread does.
"""

from __future__ import annotations

import threading

LOADING, WARMING_UP, READY, STUCK, DRAINING, STOPPED, DEAD = STATES = (
    "loading",
    "warming_up",
    "ready",
    "stuck",
    "draining",
    "stopped",
    "dead",
)
_FROM = {
    WARMING_UP: (LOADING,),
    READY: (WARMING_UP, STUCK),
    STUCK: (READY,),
    DRAINING: (READY, STUCK),
    STOPPED: (LOADING, WARMING_UP, READY, STUCK, DRAINING),
    DEAD: (LOADING, WARMING_UP, READY, STUCK, DRAINING, STOPPED),
}


class Lifecycle:
    """Changes state as the picture says; from any thread.

    Attributes:
      state: one of `STATES`.
      error: what it died of.
    """

    def __init__(self) -> None:
        self.state = LOADING
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def move(self, state: str) -> bool:
        """Enters a state; False where no arrow leads there from the present one."""
        with self._lock:
            if self.state not in _FROM[state]:
                return False
            self.state = state
            return True

    def die(self, error: BaseException) -> str:
        """Enters "dead" with its cause.

        Returns:
          The state before; "dead" when it was dead already, and nothing has changed.
        """
        with self._lock:
            before = self.state
            if before != DEAD:
                self.error, self.state = error, DEAD
            return before
