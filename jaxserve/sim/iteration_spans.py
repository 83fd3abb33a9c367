"""Iteration spans: when each iteration of a trace ran.

Steps run one after the other on the device: an iteration planned ahead begins when the one before ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduler.trace_records import IterationRecord


@dataclass(frozen=True, slots=True)
class Span:
    """An iteration's place in time; spans do not overlap."""

    began_at: float
    ended_at: float

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end, >= 0."""
        return self.ended_at - self.began_at


class Spans:
    """Gives the span of each iteration, asked in order."""

    def __init__(self) -> None:
        self._last_ended_at = float("-inf")

    def of(self, record: IterationRecord) -> Span:
        """The span of the next iteration."""
        began_at = max(record.now, self._last_ended_at)
        self._last_ended_at = max(began_at, record.updated_at)
        return Span(began_at, self._last_ended_at)
