"""Snapshots: a scheduler's whole state as JSON, from which a replay can begin in the middle of a run.

    state = take_snapshot(scheduler)                          lists, dicts, numbers, strings
    restore_snapshot(Scheduler(config, trace), state, tokens)

The scheduler is plain Python that no clock or device reaches into, so its state is the graph of its objects. Taking a
snapshot walks that graph; nothing is written twice, and what two places share they share again. Restoring walks a
fresh scheduler of the same settings beside it: what is there already, policies and the functions they hold included, is
filled, and what came with requests is made, of the classes in `_MADE` and no others. A class of the scheduler that gets
a new field needs nothing here.

A snapshot holds no token. Prompts and outputs are counts, as in the rest of a trace, and pages are told apart by the
recorder's numbers (`page_ordinals`); `tokens` gives dummies that are alike where the recorded ones were. Of a request
it has what the scheduler asks for, which an "add" of a trace has too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.core import FinishReason, Request, SamplingParams
from jaxserve.scheduler.holding import Holding
from jaxserve.scheduler.page_ordinals import PageOrdinals
from jaxserve.scheduler.plan import DecodeRows, PageMove, PageSwap, PageUpdate, Placement, PrefillChunk, StepPlan
from jaxserve.scheduler.prefix_cache import entry_key, name_of_key, page_name, root_of
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap
from jaxserve.scheduler.state import Flight
from jaxserve.scheduler.token_events import TokenEvents
from jaxserve.scheduler.waits_for import WaitsFor

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

_MADE: dict[str, Any] = {
    made.__name__: made
    for made in (
        *(DecodeRows, Flight, Holding, PageMove, PageSwap, PageUpdate, Placement, PrefillChunk),
        *(Sequence, SequenceHeap, StepPlan, TokenEvents),
    )
}
_ENUMS: dict[str, type[Enum]] = {"FinishReason": FinishReason, "WaitsFor": WaitsFor}
_SETTINGS = (SchedulerConfig, ServiceClass)
_OF_REQUEST = (
    *("request_id", "max_tokens", "priority", "deadline_at", "tenant", "service_class", "free_running"),
    *("num_imported_tokens", "exports_kv", "received_at"),
)
STOP_IDS = (1,)
"""The ids that end an output of a restored request."""


class TokensOf(Protocol):
    """Gives the tokens that stand for those of a request; see `jaxserve.sim.dummy_tokens`."""

    def at(self, request_id: str, index: int) -> int:
        """The token at `index` of prompt and output."""
        ...


def take_snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """The state now, between two calls of the scheduler; its trace must have been flushed.

    Raises:
      ValueError: it holds something that no snapshot can.
    """
    recorder = scheduler._trace
    assert recorder is not None, "a scheduler without a trace numbers no pages"
    walk = _Taking(recorder._ordinals)
    state = walk.value(scheduler)
    return {
        "kind": "snapshot",
        "iteration": recorder._num_updated,
        "state": state,
        "pages": [] if recorder._ordinals is None else walk.ordinals(recorder._ordinals),
        "live": walk.live(scheduler),
    }


def restore_snapshot(scheduler: Scheduler, snapshot: dict[str, Any], tokens: TokensOf) -> None:
    """Brings a fresh scheduler, of the settings of the recorded one, into the state of a snapshot.

    Raises:
      ValueError: the snapshot is damaged, or of another version.
    """
    recorder = scheduler._trace
    assert recorder is not None, "a replay's scheduler has a trace"
    try:
        walk = _Restoring(snapshot["pages"], scheduler.config.page_size, tokens)
        walk.value(snapshot["state"], scheduler)
        recorder._num_updated = snapshot["iteration"]
        if recorder._ordinals is not None:
            walk.fill_ordinals(recorder._ordinals, snapshot["live"], scheduler)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the snapshot does not fit this version of the scheduler: {error!r}") from error


class _Taking:
    """Objects -> JSON. Whatever can change or be shared gets a number, and is written the first time."""

    def __init__(self, ordinals: PageOrdinals | None) -> None:
        self._number_of = {} if ordinals is None else ordinals._number_of
        self._num_told = {} if ordinals is None else ordinals._num_told
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is used again

    def value(self, value: Any) -> Any:
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
            return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
        if isinstance(value, Enum):
            return {"enum": type(value).__name__, "value": value.value}
        if isinstance(value, bytes):
            return {"page": self._number_of[name_of_key(value)], "key": list(value[len(name_of_key(value)) :])}
        if isinstance(value, _SETTINGS) or callable(value):
            return {"fresh": True}
        if isinstance(value, tuple):
            kind = "tuple" if type(value) is tuple else type(value).__name__
            return {"items": kind, "values": [self.value(each) for each in value]}
        if id(value) in self._seen:
            return {"same": self._seen[id(value)]}
        number = self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return {"number": number} | self._body(value)

    def _body(self, value: Any) -> dict[str, Any]:
        match value:
            case Request():
                fields = {name: getattr(value, name) for name in _OF_REQUEST}
                scores = value.params.prompt_logprobs is not None
                return {"request": fields, "prompt": value.num_prompt_tokens, "scores": scores}
            case dict():
                return {"dict": [[self.value(key), self.value(each)] for key, each in value.items()]}
            case list() | deque():
                return {"list": [self.value(each) for each in value]}
            case frozenset() | set():
                return {"set": sorted(value)}
        if not type(value).__module__.startswith("jaxserve.scheduler."):
            raise ValueError(f"a snapshot cannot hold {type(value).__name__}")
        return {"object": type(value).__name__, "fields": self._fields(value)}

    def _fields(self, value: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in _names(value):
            if name == "_trace":
                continue
            each = getattr(value, name)
            match value, name:
                case Sequence(), "output_token_ids":
                    fields[name] = {"tokens": len(each)}
                case Sequence(), "page_names":
                    told = self._num_told.get(value.arrival, 0)
                    fields[name] = {"pages": [self._number_of[page] for page in each[:told]]}
                case Sequence(), "stop_ids":
                    continue
                case PrefillChunk(), "token_ids":
                    fields[name] = {"zeros": len(each)}
                case Placement(), "last_token_id":
                    fields[name] = min(each, 0)
                case _:
                    fields[name] = self.value(each)
        return fields

    def ordinals(self, ordinals: PageOrdinals) -> list[list[Any]]:
        """[number, number of the page before or null, tenant where there is none before], and what comes next."""
        found: list[list[Any]] = []
        for name, number in self._number_of.items():
            parent = ordinals._parent_of[name]
            found.append([number, None if parent is None else self._number_of[parent], ordinals._tenant_of.get(name)])
        return [[ordinals._next, ordinals._limit, None], *found]

    def live(self, scheduler: Scheduler) -> list[list[Any]]:
        """[id, numbers of its pages] of the live requests, by arrival."""
        return [
            [
                request_id,
                [self._number_of[page] for page in each.page_names[: self._num_told.get(each.arrival, 0)]],
            ]
            for request_id, each in scheduler._live.items()
        ]


class _Restoring:
    """JSON -> objects, into those of a fresh scheduler."""

    def __init__(self, pages: list[list[Any]], page_size: int, tokens: TokensOf) -> None:
        self._pages = pages
        self._tokens = tokens
        self._made: dict[int, Any] = {}
        self._names: dict[int, bytes] = {}
        of = {number: (parent, tenant) for number, parent, tenant in pages[1:]}
        for number in of:
            line = [number]  # up to the first page, or one that has its name
            while (parent := of[line[-1]][0]) is not None and parent not in self._names:
                line.append(parent)
            for each in reversed(line):
                parent, tenant = of[each]
                before = root_of(Request("", (0,), tenant=tenant)) if parent is None else self._names[parent]
                self._names[each] = page_name(before, (page_token(each),) * page_size)

    def value(self, value: Any, fresh: Any) -> Any:
        """What `value` stands for; `fresh` is what a fresh scheduler has in its place, None where it has nothing."""
        if not isinstance(value, dict):
            return value
        if "float" in value:
            return float(value["float"])
        if "enum" in value:
            return _ENUMS[value["enum"]](value["value"])
        if "page" in value:
            return entry_key(self._names[value["page"]], value["key"][0] if value["key"] else 0)
        if "fresh" in value:
            return fresh
        if "items" in value:
            fresh_items = fresh if isinstance(fresh, tuple) and len(fresh) == len(value["values"]) else None
            items = [self.value(each, fresh_items and fresh_items[i]) for i, each in enumerate(value["values"])]
            return tuple(items) if value["items"] == "tuple" else _MADE[value["items"]](*items)
        if "same" in value:
            return self._made[value["same"]]
        return self._numbered(value, fresh)

    def _numbered(self, value: dict[str, Any], fresh: Any) -> Any:
        number = value["number"]
        if "request" in value:
            self._made[number] = self._request(value)
        elif "set" in value:
            self._made[number] = type(fresh)(value["set"]) if fresh is not None else frozenset(value["set"])
        elif "dict" in value:
            table: dict[Any, Any] = fresh if isinstance(fresh, dict) else {}
            self._made[number], there = table, dict(table)
            table.clear()
            for key, each in value["dict"]:
                key = self.value(key, None)
                table[key] = self.value(each, there.get(key))
        elif "list" in value:
            row: list[Any] | deque[Any] = fresh if isinstance(fresh, list | deque) else []
            self._made[number], items = row, [*row, *[None] * len(value["list"])]
            row.clear()
            for each, item in zip(value["list"], items, strict=False):
                row.append(self.value(each, item))
        else:
            self._object(value, fresh)
        return self._made[number]

    def _object(self, value: dict[str, Any], fresh: Any) -> None:
        if type(fresh).__name__ == value["object"]:
            made = fresh
        else:
            cls = _MADE[value["object"]]
            made = SequenceHeap() if cls is SequenceHeap else cls.__new__(cls)
        self._made[value["number"]] = made
        fields = value["fields"]
        for name, each in fields.items():
            if isinstance(each, dict) and "zeros" in each:
                found: Any = (0,) * each["zeros"]
            elif isinstance(each, dict) and ("tokens" in each or "pages" in each):
                continue
            else:
                found = self.value(each, getattr(made, name, None))
            object.__setattr__(made, name, found)
        if isinstance(made, Sequence):
            self._tokens_of(made, fields)

    def _tokens_of(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        count, first = fields["output_token_ids"]["tokens"], sequence.num_prompt_tokens
        sequence.output_token_ids = [
            self._tokens.at(sequence.request_id, index) for index in range(first, first + count)
        ]
        sequence.page_names = [self._names[number] for number in fields["page_names"]["pages"]]
        sequence.stop_ids = sequence.request.stop_ids

    def _request(self, value: dict[str, Any]) -> Request:
        fields = value["request"]
        request = Request(
            prompt_token_ids=(0,) * value["prompt"],
            params=SamplingParams(prompt_logprobs=0 if value["scores"] else None),
            eos_token_ids=STOP_IDS,
            **fields,
        )
        at: Callable[[str, int], int] = self._tokens.at
        prompt = tuple(at(request.request_id, index) for index in range(value["prompt"]))
        return replace(request, prompt_token_ids=prompt)

    def fill_ordinals(self, ordinals: PageOrdinals, live: list[list[Any]], scheduler: Scheduler) -> None:
        """The recorder's numbering goes on where it was."""
        ordinals._next, ordinals._limit, _ = self._pages[0]
        for number, parent, tenant in self._pages[1:]:
            name = self._names[number]
            ordinals._number_of[name] = number
            ordinals._parent_of[name] = None if parent is None else self._names[parent]
            if parent is None:
                ordinals._tenant_of[name] = tenant
        for request_id, numbers in live:
            ordinals._num_told[scheduler._live[request_id].arrival] = len(numbers)


def page_token(number: int) -> int:
    """The token of which the dummy page of a number consists."""
    return 2 + 2 * number


def _names(value: Any) -> list[str]:
    """The names of an object's fields."""
    slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    return [name for name in (*slots, *getattr(value, "__dict__", {})) if hasattr(value, name)]
