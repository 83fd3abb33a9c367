"""TraceRing: the last records of a trace in memory, from a moment on from which they can be replayed.

Records alone do not do: what a scheduler decides depends on all that came before. So the ring holds a snapshot of the
scheduler (`snapshot`) and all records since. Once there are `segment` records since the last snapshot another one is
taken, and what is older than the one before it is let go. So there are at least `segment` records once there have been
so many, at most twice as many, and a snapshot is rare enough to cost nothing that counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.scheduler.snapshot import take_snapshot

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

SEGMENT = 1024
"""Records between two snapshots."""
_EVENTS_PER_RECORD = 32
"""So many events count as a record."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Segment:
    """A snapshot, None at the beginning of a run, and the records after it."""

    snapshot: dict[str, Any] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    size: float = 0.0


class TraceRing:
    """A sink of a scheduler's trace.

    Args:
      segment: records between two snapshots.
    """

    def __init__(self, segment: int = SEGMENT) -> None:
        self._limit = segment
        self._segments = [_Segment()]

    def __call__(self, record: dict[str, Any]) -> None:
        """Takes in a record."""
        last = self._segments[-1]
        last.records.append(record)
        last.size += 1 + len(record["events"]) / _EVENTS_PER_RECORD

    def after_update(self, scheduler: Scheduler) -> None:
        """Takes a snapshot if it is time; between two calls of the scheduler."""
        if self._segments[-1].size < self._limit:
            return
        scheduler.flush_trace()
        try:
            snapshot = take_snapshot(scheduler)
        except (KeyError, ValueError) as error:  # the records since the last one are kept, and the next try is later
            logger.warning("no snapshot of the scheduler could be taken: %r", error)
            self._segments[-1].size /= 2
            return
        self._segments = [self._segments[-1], _Segment(snapshot)]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The snapshot, if there is one, and all records after it."""
        segments = list(self._segments)
        first = segments[0].snapshot
        records = [record for segment in segments for record in segment.records]
        return records if first is None else [first, *records]
