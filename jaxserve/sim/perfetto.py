"""Perfetto: a trace as Chrome trace events, to be opened in ui.perfetto.dev or chrome://tracing.

One track per slot shows who held it: a "prefill" span from a request's first chunk to its last, then a
"decode" span to its last token; both again after it was preempted and took a slot anew. A track "engine"
has one span per iteration, and as instants what was refused, aborted, expired or preempted. Counters are
set when an iteration ends: queue, pages and tokens.

The trace holds no slots, so the export replays it and takes them from the plans. Times are microseconds
since the trace's first instant; equal traces give equal files.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TextIO

from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.trace_reader import (
    AbortEvent,
    AddEvent,
    EventsRecord,
    ExpireEvent,
    IterationRecord,
    TraceEvent,
    TraceHeader,
)
from jaxserve.sim.iteration_spans import Span, Spans

_PROCESS = 1
_ENGINE_TRACK = 0


@dataclass(slots=True)
class _Holding:
    """A stay of a request in a slot, in one phase."""

    request_id: str
    phase: str
    began_at: float
    ended_at: float
    num_tokens: int
    num_iterations: int


class PerfettoWriter:
    """Writes the export to `file` while it is told of a replay; `close` completes it.

    Args:
      file: open for text.
      header: of the trace.
    """

    def __init__(self, file: TextIO, header: TraceHeader) -> None:
        self._file = file
        self._spans = Spans()
        self._holdings: dict[int, _Holding] = {}  # by slot
        self._origin: float | None = None
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(_line(_metadata("process_name", _ENGINE_TRACK, name=f"jaxserve {header.model}".strip())))
        tracks = ["engine", *(f"slot {slot}" for slot in range(header.config.max_num_seqs))]
        for track, name in enumerate(tracks):
            self._put(_metadata("thread_name", track, name=name))
            self._put(_metadata("thread_sort_index", track, sort_index=track))

    def __call__(self, record: EventsRecord, plan: StepPlan | None) -> None:
        """Takes in a record and, for an iteration's, its plan."""
        for event in record.events:
            self._instant_of(event)
        if isinstance(record, IterationRecord) and plan is not None:
            self._draw(record, plan, self._spans.of(record))

    def close(self) -> None:
        """Writes what is open and the end; the file stays open."""
        for slot in sorted(self._holdings):
            self._end(slot)
        self._file.write("\n]}\n")

    def _draw(self, record: IterationRecord, plan: StepPlan, span: Span) -> None:
        self._iteration(record, plan, span)
        for request_id in plan.preempted:
            self._instant("preempted", record.now, {"request": request_id})
        for placement in plan.placements:
            self._end(placement.slot)
        for row in plan.decode:
            self._hold(row.slot, row.request_id, "decode", 1, span)
        for chunk in plan.prefill:
            self._hold(chunk.slot, chunk.request_id, "prefill", len(chunk.token_ids), span)

    def _iteration(self, record: IterationRecord, plan: StepPlan, span: Span) -> None:
        decode, prefill = len(plan.decode), plan.num_tokens - len(plan.decode)
        numbers = {"iteration": record.iteration, "bucket": record.data.get("bucket")}
        self._complete(_ENGINE_TRACK, "step", "iteration", span.began_at, span.ended_at, numbers)
        self._counter("tokens", span.began_at, decode=decode, prefill=prefill)
        self._counter("queue", span.ended_at, requests=len(record.queue))
        self._counter(
            "pages", span.ended_at, owned=record.pages_owned, cached=record.pages_cached, free=record.pages_free
        )

    def _hold(self, slot: int, request_id: str, phase: str, num_tokens: int, span: Span) -> None:
        holding = self._holdings.get(slot)
        if holding is None or (holding.request_id, holding.phase) != (request_id, phase):
            self._end(slot)
            holding = self._holdings[slot] = _Holding(request_id, phase, span.began_at, span.ended_at, 0, 0)
        holding.ended_at = span.ended_at
        holding.num_tokens += num_tokens
        holding.num_iterations += 1

    def _end(self, slot: int) -> None:
        holding = self._holdings.pop(slot, None)
        if holding is not None:
            numbers = {"request": holding.request_id, "tokens": holding.num_tokens, "steps": holding.num_iterations}
            name = f"{holding.phase} {holding.request_id}"
            self._complete(slot + 1, name, holding.phase, holding.began_at, holding.ended_at, numbers)

    def _instant_of(self, event: TraceEvent) -> None:
        match event:
            case AddEvent() if not event.accepted:
                self._instant("rejected", event.now, {"request": event.request_id, "reason": event.outcome})
            case AddEvent():
                self._microseconds(event.now)  # the origin, when it is the first
            case AbortEvent():
                self._instant("aborted", event.now, {"request": event.request_id, "reason": str(event.reason)})
            case ExpireEvent():
                self._instant("expired", event.now, {"request": event.request_id})

    def _instant(self, name: str, now: float, args: dict[str, Any]) -> None:
        place = {"pid": _PROCESS, "tid": _ENGINE_TRACK, "ts": self._microseconds(now)}
        self._put({"ph": "i", "name": name, "cat": "event", **place, "s": "p", "args": args})

    def _complete(
        self, track: int, name: str, cat: str, began_at: float, ended_at: float, args: dict[str, Any]
    ) -> None:
        begin, end = self._microseconds(began_at), self._microseconds(ended_at)
        place = {"pid": _PROCESS, "tid": track, "ts": begin, "dur": end - begin}
        self._put({"ph": "X", "name": name, "cat": cat, **place, "args": args})

    def _counter(self, name: str, now: float, **values: int) -> None:
        self._put({"ph": "C", "name": name, "pid": _PROCESS, "ts": self._microseconds(now), "args": values})

    def _microseconds(self, now: float) -> int:
        if self._origin is None:
            self._origin = now
        return round((now - self._origin) * 1e6)

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + _line(event))


def _metadata(kind: str, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": args}


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))
