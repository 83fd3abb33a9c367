"""Iteration spans: when each iteration of a trace ran.

A record tells when its plan was made, and when it was updated only if a request ended in it. Where it does
not, the update is set at the first instant known to lie after it: an event, a plan or another update. An
engine with work plans again at once, so this is late by microseconds; when nothing was left to do after an
iteration it is taken to end with the last instant before.

Steps run one after the other on the device: an iteration planned ahead begins when the one before ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxserve.scheduler.trace_reader import EventsRecord, IterationRecord


@dataclass(frozen=True, slots=True)
class Span:
    """An iteration and its place in time; spans do not overlap."""

    record: IterationRecord
    began_at: float
    ended_at: float

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end, >= 0."""
        return self.ended_at - self.began_at


class Timeline:
    """Turns records, fed in order, into spans, in order; a span comes once its end is known."""

    def __init__(self) -> None:
        self._pending: deque[IterationRecord] = deque()
        self._num_updated = 0
        self._last_ended_at = float("-inf")
        self._latest = float("-inf")  # instant known of the records fed

    def feed(self, record: EventsRecord) -> Iterator[Span]:
        """Spans that end before what `record` tells of, and its own if it tells its end."""
        while self._pending:
            ended_at = self._first_after(self._pending[0], record)
            if ended_at is None:
                break
            yield self._span(self._pending.popleft(), ended_at)
        self._latest = max([self._latest, *(event.now for event in record.events)])
        if not isinstance(record, IterationRecord):
            return
        self._num_updated += 1
        self._latest = max(self._latest, record.now)
        idle = not record.active and not record.queue and not record.in_flight
        ended_at = self._latest if idle and record.updated_at is None else record.updated_at
        if ended_at is None or self._pending:
            self._pending.append(record)
        else:
            yield self._span(record, ended_at)

    def finish(self) -> Iterator[Span]:
        """What is left when the trace ends."""
        while self._pending:
            record = self._pending.popleft()
            yield self._span(record, self._latest if record.updated_at is None else record.updated_at)

    def _first_after(self, pending: IterationRecord, record: EventsRecord) -> float | None:
        """The earliest instant that `record` tells of and that lies after the update of `pending`."""
        if pending.updated_at is not None:
            return pending.updated_at
        known = [event.now for event in record.events[:1]]
        instants = record.in_flight
        if isinstance(record, IterationRecord):
            instants = (record.now, *record.in_flight)
            known += [] if record.updated_at is None else [record.updated_at]
        later = pending.iteration + 1 + len(pending.in_flight) - self._num_updated
        known += instants[max(later, 0) : max(later, 0) + 1]
        return min(known, default=None)

    def _span(self, record: IterationRecord, ended_at: float) -> Span:
        began_at = max(record.now, self._last_ended_at)
        self._last_ended_at = max(began_at, ended_at)
        return Span(record, began_at, self._last_ended_at)


def spans(records: Iterable[EventsRecord]) -> Iterator[Span]:
    """The span of every iteration."""
    timeline = Timeline()
    for record in records:
        yield from timeline.feed(record)
    yield from timeline.finish()
