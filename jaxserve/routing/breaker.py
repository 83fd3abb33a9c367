"""Breaker: whether a replica is in rotation, from what probes and requests say of it, at instants that it is told.

    DOWN ──ready, first time──▶ UP ──not ready, refused, or failed often──▶ DOWN
      ▲ └──ready, later──▶ HALF_OPEN ──a request succeeded──▶ UP
      └────a request failed─────┘

DOWN gets no requests, HALF_OPEN one at a time, UP any number. A replica that is not there (its port refuses) or says
that it is not ready is down at once, and half open as soon as it is ready. One that fails requests though it says that
it is ready is down after `failure_threshold` of them in a row, for `open_s`, and for twice as long each time that it
fails while half open, up to `MAX_OPEN_S`. Probes that get no answer count likewise, `probe_failure_threshold` in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_OPEN_S = 60.0


class BreakerState(StrEnum):
    """See above."""

    DOWN = "down"
    HALF_OPEN = "half_open"
    UP = "up"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a replica leaves rotation.

    Attributes:
      failure_threshold: failed requests in a row.
      open_s: seconds that it then stays out at least.
      probe_failure_threshold: probes in a row that got no answer.
    """

    failure_threshold: int = 3
    open_s: float = 5.0
    probe_failure_threshold: int = 3


class Breaker:
    """Of one replica; it is down at first.

    Attributes:
      state: where it is.
      reason: why it is down, or was last.
    """

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self.state = BreakerState.DOWN
        self.reason = "not probed yet"
        self._failures = self._probe_failures = 0
        self._open_s = self._settings.open_s
        self._out_until = 0.0
        self._was_up = False

    def probe_succeeded(self, now: float) -> None:
        """It says that it is ready."""
        self._probe_failures = 0
        if self.state is BreakerState.DOWN and now >= self._out_until:
            self.state = BreakerState.HALF_OPEN if self._was_up else BreakerState.UP
            self._was_up = True

    def probe_failed(self, reason: str) -> None:
        """A probe got no answer in time."""
        self._probe_failures += 1
        if self._probe_failures >= self._settings.probe_failure_threshold:
            self._go_down(reason)

    def gone(self, reason: str) -> None:
        """Nothing listens there, or it says that it is not ready."""
        self._go_down(reason)

    def request_succeeded(self) -> None:
        """A request was answered, as well as it could be."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.UP
            self._open_s = self._settings.open_s

    def request_failed(self, now: float, reason: str) -> None:
        """A request got no answer, or half of one."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)
        elif self.state is BreakerState.DOWN or self._failures < self._settings.failure_threshold:
            return
        self._out_until = now + self._open_s
        self._go_down(reason)

    def _go_down(self, reason: str) -> None:
        self.state, self.reason = BreakerState.DOWN, reason
        self._failures = 0
