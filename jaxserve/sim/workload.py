"""Workloads: requests drawn from the distributions of a file, the same ones every time.

    name            optional
    num_requests    how many; with arrivals of kind trace at most as many as its times
    seed            of every draw; 0 by default
    arrivals        see `arrivals.py`
    prompt, output  tokens, see `lengths.py`
    max_tokens      declared output where it is more than what comes out, a distribution; default: `output`
    classes         optional list of name, share, priority, tenant, service_class, deadline_s, shared_prefix,
                    and of prompt, output and max_tokens where they differ from the above

Every distribution draws from a stream of its own, so another rate or another output length leaves the rest
of the draws as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.core import Priority
from jaxserve.sim.arrivals import Arrivals, ClosedLoop, Maker, parse_arrivals
from jaxserve.sim.json_fields import JsonFields
from jaxserve.sim.lengths import Lengths, parse_lengths
from jaxserve.sim.source import Arrival, Source, TimedSource, make_request, prompt_of


class Workload(Protocol):
    """Requests with their arrivals; every source is the same sequence from its beginning."""

    @property
    def name(self) -> str:
        """For titles."""

    @property
    def num_requests(self) -> int:
        """How many a source holds."""

    @property
    def longest(self) -> int:
        """Most tokens, prompt and declared output, of a request."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None where it follows from the system, or all come at once."""

    def source(self) -> Source:
        """From the first request on."""

    def at_rate(self, rate: float) -> Workload:
        """The same requests at another rate."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One class of a workload's requests.

    Attributes:
      share: of the requests, relative to the other classes'.
      deadline_s: after arrival; None: never.
      num_shared: first prompt tokens that are equal within a group; groups: so many of them.
    """

    name: str
    share: float
    priority: int
    tenant: str
    service_class: str
    deadline_s: float | None
    prompt: Lengths
    output: Lengths
    max_tokens: Lengths | None
    num_shared: int
    groups: int


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """A workload of distributions."""

    name: str
    num_requests: int
    seed: int
    arrivals: Arrivals
    classes: tuple[RequestClass, ...]

    @property
    def longest(self) -> int:
        """Over all classes."""
        return max(
            each.prompt.longest + max(each.output.longest, each.max_tokens.longest if each.max_tokens else 0)
            for each in self.classes
        )

    @property
    def rate(self) -> float | None:
        """As the arrivals have it."""
        return self.arrivals.natural_rate

    def at_rate(self, rate: float) -> DrawnWorkload:
        """The same lengths in the same order."""
        return replace(self, arrivals=self.arrivals.at_rate(rate))

    def source(self) -> Source:
        """From the first request on."""
        makers = islice(self._makers(), self.num_requests)
        if self.arrivals.kind == "closed_loop":
            return ClosedLoop(makers, self.arrivals.concurrency, self.arrivals.think_s)
        instants = self.arrivals.instants(self.seed)
        return TimedSource(maker(at) for maker, at in zip(makers, instants, strict=False))

    def _makers(self) -> Iterator[Maker]:
        picks = self._picks()
        draws = [_Draws(each, self.seed, index) for index, each in enumerate(self.classes)]
        for number, pick in enumerate(picks):
            yield draws[pick].maker(number)

    def _picks(self) -> Iterator[int]:
        shares = np.array([each.share for each in self.classes])
        rng = np.random.default_rng([self.seed, 1])
        while True:
            yield from rng.choice(len(shares), 1024, p=shares / shares.sum()).tolist()


class _Draws:
    """The streams of one class."""

    def __init__(self, of: RequestClass, seed: int, index: int) -> None:
        self._of = of
        self._prompt = of.prompt.stream(np.random.default_rng([seed, 2, index]))
        self._output = of.output.stream(np.random.default_rng([seed, 3, index]))
        self._max_tokens = of.max_tokens and of.max_tokens.stream(np.random.default_rng([seed, 4, index]))
        self._group = np.random.default_rng([seed, 5, index])
        self._index = index

    def maker(self, number: int) -> Maker:
        """Draws the next request, whose arrival is still open."""
        of = self._of
        num_prompt, num_output = next(self._prompt), next(self._output)
        max_tokens = next(self._max_tokens) if self._max_tokens else num_output
        # What comes out is cut at what was declared.
        num_output = min(num_output, max_tokens)
        group = int(self._group.integers(of.groups)) if of.num_shared else 0

        def make(at: float) -> Arrival:
            request = make_request(
                f"r{number}",
                prompt_of(number, num_prompt, group=self._index * 1_000_000 + group, num_shared=of.num_shared),
                num_output,
                max_tokens=max_tokens,
                priority=of.priority,
                tenant=of.tenant,
                service_class=of.service_class,
                deadline_at=None if of.deadline_s is None else at + of.deadline_s,
            )
            return Arrival(at, request, num_output, of.name)

        return make


def parse_workload(document: Any, where: str) -> DrawnWorkload:
    """Reads a workload of distributions; `where` names it in messages.

    Raises:
      ValueError: naming the field and the rule it breaks.
    """
    top = JsonFields(document, where)
    arrivals = parse_arrivals(top.object("arrivals"))
    most = len(arrivals.times) if arrivals.kind == "trace" else None
    num_requests = top.integer("num_requests", 1, most) if most else top.integer("num_requests", 1)
    if most is not None and num_requests > most:
        raise ValueError(f"{top.name_of('num_requests')} is {num_requests}; arrivals.times has {most}")
    prompt = parse_lengths(top, "prompt") if "prompt" in top or "classes" not in top else None
    output = parse_lengths(top, "output") if "output" in top or "classes" not in top else None
    max_tokens = parse_lengths(top, "max_tokens") if "max_tokens" in top else None
    entries = top.items("classes", [{"name": "normal"}])
    if not entries:
        raise ValueError(f"{top.name_of('classes')} is empty; leave it out, or list at least one class")
    classes = [
        _class(JsonFields(entry, top.name_of(f"classes[{index}]")), prompt, output, max_tokens)
        for index, entry in enumerate(entries)
    ]
    name, seed = top.text("name", Path(where).stem), top.integer("seed", 0, 0)
    top.close()
    if len({each.name for each in classes}) < len(classes):
        raise ValueError(f"{top.name_of('classes')} has two classes of one name; names must differ")
    return DrawnWorkload(name, num_requests, seed, arrivals, tuple(classes))


def parse_priority(fields: JsonFields) -> int:
    """The field `priority`: a class name or an integer; normal by default."""
    value = fields.any("priority", "normal")
    if isinstance(value, int) and not isinstance(value, bool) and Priority.MIN <= value <= Priority.MAX:
        return value
    if isinstance(value, str) and value in Priority.NAMES:
        return Priority.NAMES[value]
    names = ", ".join(Priority.NAMES)
    raise ValueError(f"{fields.name_of('priority')} is {value!r}; it must be one of {names}, or a 32-bit integer")


def priority_name(priority: int) -> str:
    """The class name of a priority, or its number."""
    return next((name for name, value in Priority.NAMES.items() if value == priority), str(priority))


def _class(
    fields: JsonFields, prompt: Lengths | None, output: Lengths | None, max_tokens: Lengths | None
) -> RequestClass:
    num_shared, groups = 0, 1
    if "shared_prefix" in fields:
        prefix = fields.object("shared_prefix")
        num_shared, groups = prefix.integer("tokens", 1), prefix.integer("groups", 1, 1)
        prefix.close()
    own_max_tokens = parse_lengths(fields, "max_tokens") if "max_tokens" in fields else max_tokens
    parsed = RequestClass(
        name=fields.text("name"),
        share=fields.number("share", 1.0, above=0.0),
        priority=parse_priority(fields),
        tenant=fields.text("tenant", ""),
        service_class=fields.text("service_class", ""),
        deadline_s=fields.number("deadline_s", None, above=0.0),
        prompt=parse_lengths(fields, "prompt", prompt),
        output=parse_lengths(fields, "output", output),
        max_tokens=own_max_tokens,
        num_shared=num_shared,
        groups=groups,
    )
    fields.close()
    return parsed
