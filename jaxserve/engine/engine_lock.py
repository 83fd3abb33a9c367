"""EngineLock: guards an engine's host state. The thread that steps the engine waits for it; nobody else waits for ever.

What is done under it takes milliseconds, unless something that should return does not: a disk, a library. Then whoever
asks with `soon`, as an event loop does, is refused after `PATIENCE_S`, and the next ones at once until the lock has had
another holder. So a hang costs an event loop one such wait, however many clients come and go.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jaxserve.core import EngineStuckError

PATIENCE_S = 1.0
"""So long somebody may have the lock before those who ask `soon` are refused."""
_NUM_LOOKS = 20  # of a wait: the time in which the whole process is stopped counts as one of them


class EngineLock:
    """A lock that its holder may take again; `with lock` waits as long as it takes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_taken = 0
        self._waited_for = -1  # whoever took it then has been waited for in vain

    def __enter__(self) -> None:
        self._lock.acquire()
        self._num_taken += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def soon(self) -> Iterator[None]:
        """Holds it.

        Raises:
          EngineStuckError: one holder has not given it back for `PATIENCE_S`.
        """
        if not self._take_soon():
            raise EngineStuckError("the engine is stuck: what it does holds its state, and does not return")
        self._num_taken += 1
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[bool]:
        """Holds it if it can be had in that time, and says so."""
        taken = self._lock.acquire(timeout=seconds)
        self._num_taken += taken
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

    def _take_soon(self) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        holder, looks = self._num_taken, 0
        while holder != self._waited_for and looks < _NUM_LOOKS:
            if self._lock.acquire(timeout=PATIENCE_S / _NUM_LOOKS):
                return True
            looks += 1
            if holder != self._num_taken:  # others come and go: there is no hang
                holder, looks = self._num_taken, 0
        self._waited_for = holder
        return False
