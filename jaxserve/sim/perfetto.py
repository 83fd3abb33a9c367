"""Perfetto: a trace as Chrome trace events, to be opened in ui.perfetto.dev or chrome://tracing.

One track per slot shows who held it: a "prefill" span from a request's first chunk to its last, then a
"decode" span to its last token; both again after it was preempted and took a slot anew. A track "engine"
has one span per iteration, and as instants what was refused, aborted, expired or preempted. Counters are
set when an iteration ends: queue, pages and tokens.

A trace file holds no slots, so the export replays it and takes them from the plans; what an engine keeps in memory
(`Recording`) has them. Times are microseconds since the trace's first instant; equal traces give equal files.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TextIO

from jaxserve.core import ChunkView, IterationView, Recording
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.trace_records import (
    AbortEvent,
    AddEvent,
    EventsRecord,
    ExpireEvent,
    IterationRecord,
    RecoverEvent,
    TraceEvent,
    TraceHeader,
)
from jaxserve.sim.iteration_spans import Span, Spans

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


class PerfettoFile:
    """Draws iterations and events into `file`; `close` completes it.

    Args:
      file: open for text.
      model: for the title.
      num_slots: a track for each.
      process: its number, where several engines are drawn into one file, from 1 on; the first begins the file.
    """

    def __init__(self, file: TextIO, model: str, num_slots: int, process: int = 1) -> None:
        self._file = file
        self._process = process
        self._holdings: dict[int, _Holding] = {}  # by slot
        self._origin: float | None = None
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n' if process == 1 else ",\n")
        file.write(_line(self._metadata("process_name", _ENGINE_TRACK, name=f"jaxserve {model}".strip())))
        tracks = ["engine", *(f"slot {slot}" for slot in range(num_slots))]
        for track, name in enumerate(tracks):
            self._put(self._metadata("thread_name", track, name=name))
            self._put(self._metadata("thread_sort_index", track, sort_index=track))

    def begin_at(self, now: float) -> None:
        """Makes `now` the time 0, unless something has been drawn."""
        self._microseconds(now)

    def iteration(self, view: IterationView) -> None:
        """Draws the next iteration."""
        self._step(view)
        for request_id in view.preempted:
            self.instant("preempted", view.preempted_at, {"request": request_id})
        for slot in view.placed:
            self._end(slot)
        tokens = view.decode_tokens or (1,) * len(view.decode_ids)
        for slot, request_id, num_tokens in zip(view.decode_slots, view.decode_ids, tokens, strict=True):
            self._hold(slot, request_id, "decode", num_tokens, view)
        for chunk in view.prefill:
            self._hold(chunk.slot, chunk.request_id, "prefill", chunk.num_tokens, view)

    def instant(self, name: str, now: float, args: dict[str, Any]) -> None:
        """Draws something that took no time."""
        place = {"pid": self._process, "tid": _ENGINE_TRACK, "ts": self._microseconds(now)}
        self._put({"ph": "i", "name": name, "cat": "event", **place, "s": "p", "args": args})

    def elsewhere(self, request_id: str, began_at: float, ended_at: float, num_tokens: int) -> None:
        """Draws the time in which a request's beginning was computed by another engine, and came."""
        place = {"cat": "remote prefill", "id": request_id, "pid": self._process, "tid": _ENGINE_TRACK}
        name = f"remote prefill {request_id}"
        begin = {"ph": "b", "name": name, **place, "ts": self._microseconds(began_at)}
        self._put(begin | {"args": {"request": request_id, "tokens": num_tokens}})
        self._put({"ph": "e", "name": name, **place, "ts": self._microseconds(ended_at)})

    def end_engine(self) -> None:
        """Writes what is open; another engine may follow in the file."""
        for slot in sorted(self._holdings):
            self._end(slot)

    def close(self) -> None:
        """Writes what is open and the end; the file stays open."""
        self.end_engine()
        self._file.write("\n]}\n")

    def _step(self, view: IterationView) -> None:
        numbers: dict[str, Any] = {"iteration": view.iteration, "bucket": view.bucket}
        if view.decode_tokens:
            numbers["decode_steps"] = view.num_steps
        self._complete(_ENGINE_TRACK, "step", "iteration", view.began_at, view.ended_at, numbers)
        self._counter("tokens", view.began_at, decode=view.num_decode_tokens, prefill=view.num_prefill_tokens)
        self._counter("queue", view.ended_at, requests=view.num_waiting)
        self._counter("pages", view.ended_at, owned=view.pages_owned, cached=view.pages_cached, free=view.pages_free)

    def _hold(self, slot: int, request_id: str, phase: str, num_tokens: int, view: IterationView) -> None:
        holding = self._holdings.get(slot)
        if holding is None or (holding.request_id, holding.phase) != (request_id, phase):
            self._end(slot)
            holding = self._holdings[slot] = _Holding(request_id, phase, view.began_at, view.ended_at, 0, 0)
        holding.ended_at = view.ended_at
        holding.num_tokens += num_tokens
        holding.num_iterations += 1

    def _end(self, slot: int) -> None:
        holding = self._holdings.pop(slot, None)
        if holding is not None:
            numbers = {"request": holding.request_id, "tokens": holding.num_tokens, "steps": holding.num_iterations}
            name = f"{holding.phase} {holding.request_id}"
            self._complete(slot + 1, name, holding.phase, holding.began_at, holding.ended_at, numbers)

    def _complete(
        self, track: int, name: str, cat: str, began_at: float, ended_at: float, args: dict[str, Any]
    ) -> None:
        begin, end = self._microseconds(began_at), self._microseconds(ended_at)
        place = {"pid": self._process, "tid": track, "ts": begin, "dur": end - begin}
        self._put({"ph": "X", "name": name, "cat": cat, **place, "args": args})

    def _counter(self, name: str, now: float, **values: int) -> None:
        self._put({"ph": "C", "name": name, "pid": self._process, "ts": self._microseconds(now), "args": values})

    def _microseconds(self, now: float) -> int:
        if self._origin is None:
            self._origin = now
        return round((now - self._origin) * 1e6)

    def _metadata(self, kind: str, track: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._process, "tid": track, "args": args}

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + _line(event))


class PerfettoWriter(PerfettoFile):
    """Draws a trace while it is told of its replay.

    Args:
      file: open for text.
      header: of the trace.
      process: see `PerfettoFile`.
    """

    def __init__(self, file: TextIO, header: TraceHeader, process: int = 1) -> None:
        super().__init__(file, header.model, header.config.max_num_seqs, process)
        self._spans = Spans()

    def __call__(self, record: EventsRecord, plan: StepPlan | None) -> None:
        """Takes in a record and, for an iteration's, its plan."""
        for event in record.events:
            self._event(event)
        if isinstance(record, IterationRecord) and plan is not None:
            self.iteration(_view(record, plan, self._spans.of(record)))

    def _event(self, event: TraceEvent) -> None:
        match event:
            case AddEvent() if not event.accepted:
                self.instant("rejected", event.now, {"request": event.request_id, "reason": event.outcome})
            case AddEvent() if event.received_at is not None:
                self.elsewhere(event.request_id, event.received_at, event.now, event.num_imported_tokens)
            case AddEvent():
                self.begin_at(event.now)
            case AbortEvent():
                self.instant("aborted", event.now, {"request": event.request_id, "reason": str(event.reason)})
            case RecoverEvent():
                self.instant("step failed", event.now, {"plans": len(event.in_flight)})
            case ExpireEvent():
                self.instant("expired", event.now, {"request": event.request_id})


def write_recording(recording: Recording, file: TextIO) -> None:
    """Draws what an engine kept in memory."""
    drawing = PerfettoFile(file, recording.model, recording.max_num_seqs)
    began = [view.began_at for view in recording.iterations[:1]] + [event.now for event in recording.events[:1]]
    if began:
        drawing.begin_at(min(began))
    for event in recording.events:
        drawing.instant(event.name, event.now, {"request": event.request_id, "reason": event.reason})
    last_ended_at = float("-inf")
    for view in recording.iterations:
        # One that was planned ahead began when the one before had ended.
        view = view._replace(began_at=max(view.began_at, last_ended_at))
        drawing.iteration(view)
        last_ended_at = view.ended_at
    drawing.close()


def _view(record: IterationRecord, plan: StepPlan, span: Span) -> IterationView:
    return IterationView(
        iteration=record.iteration,
        began_at=span.began_at,
        ended_at=span.ended_at,
        bucket=record.data.get("bucket"),
        decode_slots=plan.decode.slots,
        decode_ids=plan.decode.request_ids,
        prefill=tuple(ChunkView(chunk.slot, chunk.request_id, len(chunk.token_ids)) for chunk in plan.prefill),
        placed=tuple(placement.slot for placement in plan.placements),
        preempted=plan.preempted,
        preempted_at=record.now,
        num_waiting=len(record.queue),
        pages_free=record.pages_free,
        pages_cached=record.pages_cached,
        pages_owned=record.pages_owned,
        decode_tokens=record.decode_tokens if plan.num_steps > 1 else (),
    )


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))
