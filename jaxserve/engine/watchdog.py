"""Watchdog: notices an engine that makes no progress. That its thread lives says nothing: it may wait for ever.

Progress is a step that was dispatched or taken in, and before the engine is ready a call of its progress callback.
What counts is the age of the last one while there is work; an idle engine has no age. So a slow step, a device that
hangs, a lock that is never given back and a scheduler that has work and plans nothing all look alike, and none of them
needs to be asked: `StepClock` is one attribute, written by the engine's thread and read by the watchdog's.

A process that was stopped, by a debugger, a signal or its virtual machine, is not stuck: the watchdog was late itself
then, and that time does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from absl import logging

from jaxserve.engine.log_aside import log_aside

LATE_S = 1.0
"""A look that is later than this is so because the whole process did not run."""


class StepClock:
    """Since when the engine has work and has made no progress.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last progress, or since work came; 0 while there is none."""
        since = self._since
        return 0.0 if since is None else max(self._clock() - since, 0.0)

    def working(self) -> None:
        """There is work; counts from the first call since the last progress."""
        if self._since is None:
            self._since = self._clock()

    def progressed(self) -> None:
        """A step began or came back; work goes on."""
        self._since = self._clock()

    def idle(self) -> None:
        """There is no work."""
        self._since = None

    def forgive(self, seconds: float) -> None:
        """So much time does not count; progress that comes just now is not undone by it."""
        since = self._since
        if since is not None and seconds > 0:
            later = min(since + seconds, self._clock())
            if self._since == since:
                self._since = later


class Watchdog:
    """Calls `on_look` again and again from a thread of its own, until it says that there is nothing left to watch.

    Args:
      period_s: between two calls.
      on_look: looks at the engine, told by how many seconds the look is late, if by more than `LATE_S`, else 0; False
        ends the watch. What it raises is logged, and the watch goes on.
      clock: seconds, monotonic.
    """

    def __init__(
        self, period_s: float, on_look: Callable[[float], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._period_s = period_s
        self._clock = clock
        self._on_look = on_look
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; harmless when it has ended."""
        self._ended.set()

    def _run(self) -> None:
        looked_at = self._clock()
        while not self._ended.wait(self._period_s):
            now = self._clock()
            late_s, looked_at = now - looked_at - self._period_s, now
            try:
                if not self._on_look(late_s if late_s > LATE_S else 0.0):
                    return
            except Exception as error:
                log_aside(
                    logging.ERROR, "the watchdog could not look at the engine; it will look again", exc_info=error
                )


def look_period_s(*limits_s: float) -> float:
    """How often to look, so that a limit is overrun by a quarter of it at most, and by no more than a second."""
    return min([1.0, *(limit / 4 for limit in limits_s if limit)])
