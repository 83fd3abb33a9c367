"""TraceReader: a trace file as typed records, each checked before it is handed out.

A reader checks form, not sense: every key the recorder writes is there and of its kind, and iterations
count from 0. Whether a scheduler decides so is for replay to find out. A last line without its end, what a
crash leaves behind, is dropped and noted in `truncated_line`; any other damage is a `ValueError` that names
file, line and rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.core import FinishReason
from jaxserve.scheduler.trace import READABLE_VERSIONS
from jaxserve.scheduler.trace_fields import TraceFields
from jaxserve.scheduler.trace_records import (
    AbortEvent,
    AddEvent,
    BudgetEvent,
    EventsRecord,
    ExpireEvent,
    HoldEvent,
    IterationRecord,
    RecoverEvent,
    ReleaseEvent,
    ResetEvent,
    StarveEvent,
    TraceEvent,
    TraceHeader,
)
from jaxserve.scheduler.waits_for import WaitsFor


class TraceReader:
    """Iterates over the records of a trace file, any number of times.

    Args:
      path: JSON lines, as `TraceWriter` writes them.

    Attributes:
      truncated_line: number of a last line that was cut short, once an iteration has come to the end; else None.

    Raises:
      OSError: it cannot be read.
      ValueError: no header, or one that cannot be used here.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.truncated_line: int | None = None
        lines = self._lines()
        first = next(lines, None)
        if first is None:
            raise ValueError(f"trace {self._path} holds no whole line; it must begin with a header; record it again")
        self.header = _header(first)
        second = next(lines, None)
        if second is not None and second.data.get("kind") == "snapshot":
            second.integer("iteration", 0)
            self.header = replace(self.header, snapshot=second.data)

    def __iter__(self) -> Iterator[EventsRecord]:
        """The records, in order.

        Raises:
          ValueError: a line breaks a rule; the message names it.
        """
        num_updated = self.header.first_iteration
        lines = self._lines()
        next(lines)
        if self.header.snapshot is not None:
            next(lines)
        for line in lines:
            record = _record(line, num_updated)
            num_updated += isinstance(record, IterationRecord)
            yield record

    def _lines(self) -> Iterator[TraceFields]:
        self.truncated_line = None
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    self.truncated_line = number
                    return
                where = f"trace {self._path} line {number}"
                try:
                    data = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is not JSON: {error}; the file is damaged, record it again") from error
                yield TraceFields(where, number, data)


def _header(line: TraceFields) -> TraceHeader:
    if line.data.get("kind") != "header":
        line.wrong("kind", '"header": a trace begins with one')
    version = line.integer("schema_version")
    if version not in READABLE_VERSIONS:
        *others, last = map(str, READABLE_VERSIONS)
        readable = f"{', '.join(others)} and {last}"
        raise ValueError(
            f"{line.where}: schema_version is {version}; this version of jaxserve reads {readable};"
            " use the version that recorded it"
        )
    settings = line.data.get("config")
    if not isinstance(settings, dict):
        line.wrong("config", "an object, the scheduler's settings: without them nothing can be replayed")
    unknown = sorted(settings.keys() - {field.name for field in fields(SchedulerConfig)})
    if unknown:
        raise ValueError(
            f"{line.where}: config has {', '.join(unknown)}; this version of jaxserve knows no such setting;"
            " use the version that recorded it"
        )
    died = line.data.get("died")
    if died is not None and not (isinstance(died, dict) and isinstance(died.get("error"), str)):
        line.wrong("died", "an object whose `error` is a text")
    try:
        classes = tuple(ServiceClass(**each) for each in settings.get("service_classes", ()))
        config = SchedulerConfig(**{**settings, "service_classes": classes})
        return TraceHeader(line.text("model"), config, died_of=died["error"] if died else "")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{line.where}: config: {error}; the file is damaged, record it again") from error


def _record(line: TraceFields, num_updated: int) -> EventsRecord:
    kind = line.data.get("kind")
    if kind not in (None, "events"):
        line.wrong("kind", '"events" or absent')
    if kind is None and line.integer("iteration") != num_updated:
        line.wrong("iteration", f"{num_updated}, the next one: lines are missing or doubled")
    in_flight = line.instants("in_flight")
    num_plans = num_updated + len(in_flight) + (kind is None)
    common: dict[str, Any] = {
        "line": line.line,
        "data": line.data,
        "events": _events(line, num_plans, num_updated),
        "in_flight": in_flight,
        **{key: line.ids(key) for key in ("rejected", "completed", "aborted", "expired", "failed")},
    }
    if kind == "events":
        return EventsRecord(**common)
    decode = line.ids("decode")
    return IterationRecord(
        **common,
        iteration=num_updated,
        now=line.instant("now"),
        decode=decode,
        decode_steps=line.integer("decode_steps", 1) if "decode_steps" in line.data else 1,
        decode_tokens=_decode_tokens(line, len(decode)),
        prefill=line.chunks("prefill"),
        prefill_emitted=line.ids("prefill_emitted"),
        preempted=line.ids("preempted"),
        queue=line.ids("queue"),
        active=line.ids("active"),
        unused_budget=line.integer("unused_budget", 0),
        pages_free=line.integer("pages_free", 0),
        pages_cached=line.integer("pages_cached", 0),
        pages_owned=line.integer("pages_owned", 0),
        front_waits_for=_waits_for(line),
        updated_at=line.instant("updated_at"),
        preempted_next=line.ids("preempted_next"),
        named=line.named() if "named" in line.data else (),
        imported=line.chunks("imported") if "imported" in line.data else (),
        exported=line.chunks("exported") if "exported" in line.data else (),
    )


def _decode_tokens(line: TraceFields, num_rows: int) -> tuple[int, ...]:
    if "decode_tokens" not in line.data:
        return (1,) * num_rows
    counts = line.numbers("decode_tokens")
    if len(counts) != num_rows or min(counts, default=0) < 0:
        line.wrong("decode_tokens", f"a count of at least 0 for each of {num_rows} decode rows")
    return counts


def _waits_for(line: TraceFields) -> WaitsFor | None:
    value = line.data.get("front_waits_for", "")
    if value is not None and value not in tuple(WaitsFor):
        line.wrong("front_waits_for", f"null or one of {', '.join(WaitsFor)}")
    return value and WaitsFor(value)


def _events(line: TraceFields, most_plans: int, num_updated: int) -> tuple[TraceEvent, ...]:
    fields = line.events()
    # Until a recovery the plans count that it takes back.
    most_of_each = []
    for field in reversed(fields):
        if field.data.get("kind") == "recover":
            most_plans = num_updated + len(field.instants("in_flight"))
        most_of_each.append(most_plans)
    pairs = zip(fields, reversed(most_of_each), strict=True)
    events = tuple(_event(field, most, num_updated) for field, most in pairs)
    for index, event in enumerate(events):
        if isinstance(event, AddEvent) and event.num_together > 1:
            others = events[index + 1 : index + event.num_together]
            if len(others) + 1 < event.num_together or not all(isinstance(other, AddEvent) for other in others):
                fields[index].wrong("together", "the number of arrivals that stand here one after another, or fewer")
    return events


def _event(event: TraceFields, most_plans: int, num_updated: int) -> TraceEvent:
    made, updated = event.step()
    if updated != num_updated or not num_updated <= made <= most_plans:
        event.wrong("step", f"[{num_updated} to {most_plans}, {num_updated}], by the plans of the records around it")
    numbered = next((key for key in ("pages", "named") if key in event.data), None)
    place = (event.text("id"), event.instant("now"), made, updated, event.numbers(numbered) if numbered else ())
    match event.data.get("kind"):
        case "add":
            return AddEvent(
                *place,
                num_prompt_tokens=event.integer("prompt", 1),
                max_tokens=event.integer("max_tokens", 0),
                priority=event.integer("priority"),
                tenant=event.text("tenant"),
                service_class=event.text("service_class"),
                deadline_at=event.instant_or_null("deadline_at"),
                outcome=event.text("outcome"),
                scores=event.flag("scores") if "scores" in event.data else False,
                free_running=event.flag("free_running") if "free_running" in event.data else False,
                num_together=event.integer("together", 2) if "together" in event.data else 1,
                num_imported_tokens=event.integer("imports", 1) if "imports" in event.data else 0,
                exports=event.flag("exports") if "exports" in event.data else False,
                received_at=event.instant_or_null("received_at") if "received_at" in event.data else None,
            )
        case "abort":
            if event.data.get("reason") not in tuple(FinishReason):
                event.wrong("reason", f"one of {', '.join(FinishReason)}")
            forgets = event.flag("forgets") if "forgets" in event.data else False
            return AbortEvent(*place, FinishReason(event.data["reason"]), forgets)
        case "expire":
            return ExpireEvent(*place)
        case "starve":
            return StarveEvent(*place)
        case "reset_prefix_cache":
            return ResetEvent(*place)
        case "recover":
            return RecoverEvent(*place, event.flag("keeps_cache"), event.instants("in_flight"))
        case "hold":
            return HoldEvent(*place)
        case "release":
            return ReleaseEvent(*place)
        case "budget":
            return BudgetEvent(*place, event.integer("tokens", 1))
    event.wrong("kind", "add, abort, expire, starve, reset_prefix_cache, recover, hold, release or budget")
