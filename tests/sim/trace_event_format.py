"""The rules of the Trace Event Format, as far as an exporter can break them.

"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

Event = dict[str, Any]

METADATA: dict[str, tuple[str, type]] = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
"""By name: the argument, and its type."""


def violations(document: Any) -> list[str]:
    """Every rule that `document`, parsed from JSON in its object form, breaks: the event's number, and the rule."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["the document must be an object with a list traceEvents"]
    found = []
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit must be ms or ns")
    events = document["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number}: {rule}" for rule in _of_event(event)]
    return found or [*_of_threads(events), *_of_names(events)]


def _of_event(event: Any) -> Iterator[str]:
    if not isinstance(event, dict):
        yield "it must be an object"
        return
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in _PHASES:
        yield f"ph must be one of {', '.join(_PHASES)}"
        return
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield "name must be a text"
    if not _is_int(event.get("pid")):
        yield "pid must be an integer"
    if "args" in event and not isinstance(event["args"], dict):
        yield "args must be an object"
        return
    yield from _PHASES[phase](event)


def _complete(event: Event) -> Iterator[str]:
    yield from _thread_and_time(event)
    if not _is_time(event.get("dur")):
        yield "dur must be a number of microseconds, 0 or more"
    if not isinstance(event.get("cat"), str):
        yield "cat must be a text"


def _instant(event: Event) -> Iterator[str]:
    yield from _thread_and_time(event)
    if event.get("s", "t") not in ("g", "p", "t"):
        yield "s must be g, p or t"


def _counter(event: Event) -> Iterator[str]:
    if not _is_time(event.get("ts")):
        yield "ts must be a number of microseconds, 0 or more"
    values = event.get("args")
    if not values or not all(_is_number(value) for value in values.values()):
        yield "args of a counter must be numbers, one at least"


def _metadata(event: Event) -> Iterator[str]:
    if event["name"] not in METADATA:
        yield f"name of metadata must be one of {', '.join(METADATA)}"
        return
    key, kind = METADATA[event["name"]]
    value = event.get("args", {}).get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        yield f"args of {event['name']} must have {key}, of type {kind.__name__}"
    if event["name"].startswith("thread") and not _is_int(event.get("tid")):
        yield "tid must be an integer"


def _thread_and_time(event: Event) -> Iterator[str]:
    if not _is_int(event.get("tid")):
        yield "tid must be an integer"
    if not _is_time(event.get("ts")):
        yield "ts must be a number of microseconds, 0 or more"


_PHASES: dict[str, Callable[[Event], Iterator[str]]] = {
    "X": _complete,
    "i": _instant,
    "C": _counter,
    "M": _metadata,
}


def _of_threads(events: list[Event]) -> Iterator[str]:
    """Complete events of a thread lie apart or one inside the other."""
    by_thread: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], number))
    for thread, spans in by_thread.items():
        open_ends: list[float] = []
        for begin, end, number in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                yield f"event {number}: it overlaps another of thread {thread} and is not inside it"
            open_ends.append(end)


def _of_names(events: list[Event]) -> Iterator[str]:
    """Processes and threads that events are of have one name each."""
    named = [(e["name"], e["pid"], e.get("tid") if "thread" in e["name"] else None) for e in events if e["ph"] == "M"]
    for each in sorted({each for each in named if named.count(each) > 1}, key=str):
        yield f"{each[0]} of process {each[1]}, thread {each[2]} is given more than once"
    used = {("process_name", event["pid"], None) for event in events}
    used |= {("thread_name", event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"}
    for kind, process, thread in sorted(used.difference(named), key=str):
        yield f"{kind} of process {process}, thread {thread} is missing"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0
