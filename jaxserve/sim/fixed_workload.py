"""Fixed workloads: requests that are listed one by one, in a JSON file or in a recorded trace.

A list is `{"requests": [...]}`, each with `arrival` (seconds), `max_tokens`, and `prompt_ids` or `prompt_len`;
optional are `output` (tokens that come out, default `max_tokens`), `priority`, `tenant`, `service_class`,
`deadline_s` and `class`. Texts, ids and the file's other fields are not needed and not read. A recorded trace is what
`--trace_file` writes; arrivals count from its first, and an output ends where it ended in the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from jaxserve.scheduler.trace_fields import TraceFields
from jaxserve.sim.arrivals import Arrivals
from jaxserve.sim.json_fields import MAX_TOKENS, JsonFields, read_json
from jaxserve.sim.source import Arrival, Source, TimedSource, make_request, prompt_of
from jaxserve.sim.workload import Workload, parse_priority, parse_workload, priority_name


@dataclass(slots=True)
class Entry:
    """One listed request; `deadline_s` after its arrival."""

    at: float
    prompt: int | tuple[int, ...]
    max_tokens: int
    num_output: int
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    deadline_s: float | None = None
    class_name: str = ""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)

    def arrival(self, number: int, at: float) -> Arrival:
        """The request, arriving at `at`."""
        request = make_request(
            f"r{number}",
            prompt_of(number, self.prompt) if isinstance(self.prompt, int) else self.prompt,
            self.num_output,
            max_tokens=self.max_tokens,
            priority=self.priority,
            tenant=self.tenant,
            service_class=self.service_class,
            deadline_at=None if self.deadline_s is None else at + self.deadline_s,
        )
        return Arrival(at, request, self.num_output, self.class_name or priority_name(self.priority))


@dataclass(frozen=True, slots=True)
class FixedWorkload:
    """Listed requests, in order of arrival."""

    name: str
    entries: tuple[Entry, ...]
    arrivals: Arrivals

    @property
    def num_requests(self) -> int:
        """How many are listed."""
        return len(self.entries)

    @property
    def longest(self) -> int:
        """Over all entries."""
        return max(entry.num_prompt + entry.max_tokens for entry in self.entries)

    @property
    def rate(self) -> float | None:
        """None when all come at once."""
        return self.arrivals.natural_rate

    def at_rate(self, rate: float) -> FixedWorkload:
        """Their instants stretched or squeezed; drawn (poisson) where all come at once."""
        arrivals = self.arrivals if self.rate else replace(self.arrivals, kind="batch")
        return replace(self, arrivals=arrivals.at_rate(rate))

    def source(self) -> Source:
        """From the first request on."""
        return TimedSource(self._arrivals())

    def _arrivals(self) -> Iterator[Arrival]:
        for number, (entry, at) in enumerate(zip(self.entries, self.arrivals.instants(0), strict=False)):
            yield entry.arrival(number, at)


def load_workload(path: str | Path) -> Workload:
    """Reads a workload file of any of the three forms.

    Raises:
      ValueError: naming the field and the rule it breaks.
    """
    where = Path(path).name
    if Path(path).suffix == ".jsonl":
        return recorded_workload(path)
    document = read_json(path)
    if isinstance(document, dict) and "requests" in document:
        return listed_workload(document, where)
    return parse_workload(document, where)


def listed_workload(document: Any, where: str) -> FixedWorkload:
    """Reads a list of requests. See `load_workload`."""
    top = JsonFields(document, where)
    entries = [
        _entry(JsonFields(each, f"{where}.requests[{index}]")) for index, each in enumerate(top.items("requests"))
    ]
    return _fixed(top.text("name", Path(where).stem), entries, where)


def recorded_workload(path: str | Path) -> FixedWorkload:
    """Reads the arrivals of a trace. See `load_workload`."""
    try:
        entries = _recorded_entries(path)
    except KeyError as error:
        raise ValueError(
            f"{path}: a record or request lacks {error}; a trace must be whole, from its header on"
        ) from None
    first_at = entries[0].at if entries else 0.0
    for entry in entries:
        entry.at -= first_at
    return _fixed(Path(path).stem, entries, Path(path).name)


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a trace file, without its header.

    Raises:
      ValueError: it cannot be read, or is no trace.
    """
    try:
        with Path(path).open() as file:
            for number, line in enumerate(file):
                record = json.loads(line)
                is_header = isinstance(record, dict) and record.get("kind") == "header"
                if is_header != (number == 0) or not isinstance(record, dict):
                    raise ValueError(f"line {number + 1} is no trace record; a trace begins with its header")
                if not is_header:
                    yield record
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace (JSON lines, as --trace_file writes them): {error}") from None


def _recorded_entries(path: str | Path) -> list[Entry]:
    entries: list[Entry] = []
    by_id: dict[str, Entry] = {}
    emitted: dict[int, int] = {}  # by identity of the entry
    for number, record in enumerate(read_trace(path), 2):
        line = TraceFields(
            f"{path} line {number}", number, {"events": [], "decode": [], "prefill_emitted": []} | record
        )
        for event in line.events():
            if event.text("kind") == "add" and event.text("outcome") != "duplicate_id":
                entries.append(_from_event(event))
                by_id[event.text("id")] = entries[-1]
        for request_id in chain(line.ids("decode"), line.ids("prefill_emitted")):
            entry = by_id[request_id]
            emitted[id(entry)] = emitted.get(id(entry), 0) + 1
    for entry in entries:
        # One that was refused emitted nothing: it may be admitted here, and would use what it declared.
        entry.num_output = max(min(emitted.get(id(entry), entry.max_tokens), entry.max_tokens), 1)
        entry.max_tokens = max(entry.max_tokens, 1)
    return entries


def _fixed(name: str, entries: list[Entry], where: str) -> FixedWorkload:
    if not entries:
        raise ValueError(f"{where} has no requests; it must have at least one")
    entries.sort(key=lambda entry: entry.at)
    return FixedWorkload(name, tuple(entries), Arrivals("trace", times=tuple(entry.at for entry in entries)))


def _from_event(event: TraceFields) -> Entry:
    deadline_at = event.instant_or_null("deadline_at") if "deadline_at" in event.data else None
    prompt, max_tokens = event.integer("prompt", 1), event.integer("max_tokens", 0)
    if max(prompt, max_tokens) > MAX_TOKENS:
        event.wrong("prompt" if prompt > MAX_TOKENS else "max_tokens", f"at most {MAX_TOKENS}")
    return Entry(
        at=event.instant("now"),
        prompt=prompt,
        max_tokens=max_tokens,
        num_output=0,
        priority=event.integer("priority"),
        tenant=event.text("tenant"),
        service_class=event.text("service_class") if "service_class" in event.data else "",
        deadline_s=None if deadline_at is None else deadline_at - event.instant("now"),
    )


def _entry(fields: JsonFields) -> Entry:
    max_tokens = fields.integer("max_tokens", 1, most=MAX_TOKENS)
    num_output = fields.integer("output", 1, max_tokens)
    if num_output > max_tokens:
        raise ValueError(f"{fields.name_of('output')} is {num_output}; it must be at most max_tokens ({max_tokens})")
    prompt: int | tuple[int, ...]
    if "prompt_ids" in fields:
        prompt = tuple(fields.items("prompt_ids"))
        if not prompt or any(isinstance(token, bool) or not isinstance(token, int) for token in prompt):
            raise ValueError(f"{fields.name_of('prompt_ids')} must be a list of at least one integer")
    else:
        prompt = fields.integer("prompt_len", 1, most=MAX_TOKENS)
    return Entry(
        at=fields.number("arrival", 0.0, low=0.0),
        prompt=prompt,
        max_tokens=max_tokens,
        num_output=num_output,
        priority=parse_priority(fields),
        tenant=fields.text("tenant", ""),
        service_class=fields.text("service_class", ""),
        deadline_s=fields.number("deadline_s", None, above=0.0),
        class_name=fields.text("class", ""),
    )
