"""Lifecycle: the state of an engine that has a thread of its own, as its fronts and every probe see it.

    loading ─▶ warming_up ─▶ ready ◀──▶ stuck ─▶ stopped      stuck: a step takes too long, and comes back after all
                               │          ▲
                               ▼          │
                            draining ◀────┘ ─▶ stopped
    dead   from anywhere, and for ever

A drain hides nothing: an engine that is told to drain while it is stuck stays so, and drains when its step comes back.

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
    READY: (WARMING_UP,),
    STUCK: (READY, DRAINING),
    STOPPED: (LOADING, WARMING_UP, READY, STUCK, DRAINING),
    DEAD: (LOADING, WARMING_UP, READY, STUCK, DRAINING, STOPPED),
}


class Lifecycle:
    """Changes state as the picture says; from any thread.

    Attributes:
      state: one of `STATES`.
      error: what it died of.
      is_draining: it takes no requests any more.
    """

    def __init__(self) -> None:
        self.state = LOADING
        self.is_draining = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def move(self, state: str) -> bool:
        """Enters a state; False where no arrow leads there from the present one. `drain` and `resume` enter theirs."""
        with self._lock:
            if self.state not in _FROM[state]:
                return False
            self.state = state
            return True

    def drain(self) -> None:
        """Takes no requests from now on, once it has; what is stuck shows that it is."""
        with self._lock:
            self.is_draining = self.state in (READY, STUCK, DRAINING)
            if self.state == READY:
                self.state = DRAINING

    def resume(self) -> bool:
        """Goes on as before, from "stuck"; False from another state."""
        with self._lock:
            if self.state != STUCK:
                return False
            self.state = DRAINING if self.is_draining else READY
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
