"""Pulse: signs of life, and a clock that stands still while this process does.

Time is counted in beats of a thread, not read from a clock: a machine that is suspended, or a process that is stopped
and goes on, has lost one beat, not the hour that it slept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 20
_LONGEST_BEAT_S = 1.0


class Pulse:
    """Calls `beat` regularly, on a thread of its own.

    Args:
      timeout_s: that `lasted` tells of.
      beat: must not wait for long. What it raises is logged, and the next beat comes.

    Attributes:
      now: beats so far; what `lasted` takes.
    """

    def __init__(self, timeout_s: float, beat: Callable[[], None]) -> None:
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        self._timeout_beats = timeout_s / self._beat_s
        self._beat = beat
        self._ended = threading.Event()
        self.now = 0
        self._thread = threading.Thread(target=self._run, name="hosts pulse", daemon=True)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, soon."""
        self._ended.set()

    def lasted(self, since: int) -> bool:
        """Whether the timeout has passed since the beat `since`."""
        return self.now - since > self._timeout_beats

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            self.now += 1
            try:
                self._beat()
            except Exception:
                log.exception("a sign of life failed; the next one will be tried")
