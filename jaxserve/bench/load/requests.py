"""Load: the requests of `bench serve`, and when they come.

Requests are a workload's (by name or file, see docs/simulation.md) or drawn from two length distributions. A run takes
them in order, from the first again where it needs more; what comes again differs in its prompt's first token, run by
run and turn by turn, so that no server answers it from a prefix cache. The first run's prompts are the workload's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from absl.flags import FlagValues

import jaxserve
from jaxserve.bench.load.client import Item
from jaxserve.sim.arrivals import Arrivals
from jaxserve.sim.fixed_workload import FixedWorkload, load_workload
from jaxserve.sim.json_fields import JsonFields
from jaxserve.sim.lengths import parse_lengths
from jaxserve.sim.source import OTHER_ID
from jaxserve.sim.workload import parse_workload

NAMED = ("w1", "w2", "w3")
WORKLOADS = Path(jaxserve.__file__).resolve().parents[1] / "configs" / "workloads"
W3_EVERY, W3_FACTORS = 10, (0.5, 0.8, 1.0, 1.2)
"""w3 is w1 with a long prompt in every tenth request, at these factors of the capacity."""
DRAWN_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send.

    Attributes:
      name: of the workload.
      items: one turn of them, at the workload's own instants.
      num_requests: of a run.
      kind: of the arrivals; None: the workload's own instants.
      cv, ramp_to: of gamma and ramp.
      seed: of the arrivals.
    """

    name: str
    items: tuple[Item, ...]
    num_requests: int
    kind: str | None = None
    cv: float = 1.0
    ramp_to: float | None = None
    seed: int = 0

    def run(self, number: int, rate: float | None = None, *, kind: str | None = None) -> list[Item]:
        """The requests of run `number`.

        Args:
          rate: requests per second, for arrivals that have one.
          kind: of arrivals, instead of the load's.
        """
        instants = self._instants(kind or self.kind, rate)
        highest = 1 + max(max(item.prompt) for item in self.items)
        turns = -(-self.num_requests // len(self.items))
        found = []
        for index, at in enumerate(instants):
            turn, place = divmod(index, len(self.items))
            item = self.items[place]
            first = (item.prompt[0] + number * turns + turn) % highest
            found.append(replace(item, at=at, prompt=(first, *item.prompt[1:])))
        return found

    def warmup(self, count: int, number: int) -> list[Item]:
        """The first `count` requests at once and cut short; their prompts are unlike those of any run."""
        rng = np.random.default_rng([self.seed, 9, number])
        highest = 1 + max(max(item.prompt) for item in self.items)
        items = islice((item for _ in iter(int, 1) for item in self.items), count)
        return [
            Item(0.0, tuple(rng.integers(0, highest, len(item.prompt)).tolist()), min(item.max_tokens, 16))
            for item in items
        ]

    def _instants(self, kind: str | None, rate: float | None) -> list[float]:
        count = self.num_requests
        if kind is None:
            return [item.at for item, _ in zip(_repeated(self.items), range(count), strict=False)]
        if kind == "batch":
            return [0.0] * count
        assert rate is not None, kind
        if kind == "ramp":
            assert self.ramp_to is not None
            return ramp_instants(rate, self.ramp_to, count, self.seed)
        return list(islice(Arrivals(kind, rate=rate, cv=self.cv).instants(self.seed), count))


def read_load(flags: FlagValues) -> Load:
    """The load that the flags describe.

    Raises:
      ValueError: naming the flag or the workload's field, and the rule it breaks.
    """
    name = flags.workload
    every = flags.long_prompt_every or (W3_EVERY if name == "w3" and not flags["long_prompt_every"].present else 0)
    name, items = _drawn(flags) if name is None else read_items(name, flags.seed)
    items = _with_long_prompts(items, every, flags.long_prompt_tokens, flags.seed)
    kind = flags.arrivals
    if kind is None and (flags.rates or flags.factors or name == "w3"):
        kind = "poisson"
    if kind == "batch" and (flags.rates or flags.factors):
        raise ValueError("arrivals is batch, all at once; that has no rate: leave out rates and factors")
    if kind not in (None, "batch") and not (flags.rates or flags.factors or name == "w3"):
        raise ValueError(f"arrivals is {kind}; say how fast they come with rates, or with factors of the capacity")
    if flags.rates and flags.factors:
        raise ValueError("rates and factors are given; a factor sets the rate itself")
    if (kind == "ramp") != (flags.ramp_to is not None):
        raise ValueError("arrivals ramp and ramp_to go together: the rate grows from the one in rates to ramp_to")
    if kind == "ramp" and flags.rates:
        _check_ramp(max(flags.rates), flags.ramp_to)
    count = flags.num_requests or (len(items) if flags.workload else DRAWN_REQUESTS)
    if kind is None and count > len(items) and any(item.at for item in items):
        raise ValueError(
            f"num_requests is {count} and {name} has {len(items)} with instants of their own; set arrivals to repeat"
            " them"
        )
    return Load(name, items, count, kind, flags.cv, flags.ramp_to, flags.seed)


def read_items(workload: str, seed: int = 0) -> tuple[str, tuple[Item, ...]]:
    """A workload's name and requests.

    Args:
      workload: a name of `NAMED`, or a file.
      seed: of prompts that the file gives by their length only.

    Raises:
      ValueError: there is no such file, it breaks a rule, or its arrivals are a closed loop.
    """
    path = WORKLOADS / f"{'w1' if workload == 'w3' else workload}.json" if workload in NAMED else Path(workload)
    if not path.exists():
        raise ValueError(f"workload is {workload!r}; there is no such file, and the names are {', '.join(NAMED)}")
    found = load_workload(path)
    source = found.source()
    items = []
    while source.peek() is not None:
        arrival = source.take()
        request = arrival.request
        items.append(Item(arrival.at, tuple(request.prompt_token_ids), arrival.num_output_tokens))
    if len(items) < found.num_requests:
        raise ValueError(f"{path.name} has closed_loop arrivals; a load is sent at instants: set another kind")
    listed = isinstance(found, FixedWorkload) and not any(isinstance(each.prompt, int) for each in found.entries)
    if not listed:
        items = [replace(item, prompt=_spelled(item.prompt, 256, seed)) for item in items]
    return (workload if workload in NAMED else found.name), tuple(items)


def ramp_instants(first_rate: float, last_rate: float, count: int, seed: int) -> list[float]:
    """Poisson arrivals whose rate grows evenly from one rate to the other while `count` are expected.

    The expected number until t is N(t) = r t + (s - r) t^2 / (2 T) with T = 2 count / (r + s); the k-th arrival is
    where N equals a sum of k exponential gaps of mean 1.

    Raises:
      ValueError: the rate would fall.
    """
    _check_ramp(first_rate, last_rate)
    expected = np.cumsum(np.random.default_rng([seed, 0]).exponential(1.0, count))
    span_s = 2 * count / (first_rate + last_rate)
    slope = (last_rate - first_rate) / span_s
    return ((np.sqrt(first_rate**2 + 2 * slope * expected) - first_rate) / slope).tolist()  # type: ignore[no-any-return]


def _check_ramp(first_rate: float, last_rate: float) -> None:
    if last_rate <= first_rate:
        raise ValueError(f"ramp_to is {last_rate:g}; it must be above the first rate ({first_rate:g})")


def _drawn(flags: FlagValues) -> tuple[str, tuple[Item, ...]]:
    document = {
        "num_requests": flags.num_requests or DRAWN_REQUESTS,
        "seed": flags.seed,
        "arrivals": {"kind": "batch"},
        "prompt": _lengths(flags.prompt_lengths, "prompt_lengths") or flags.prompt_tokens,
        "output": _lengths(flags.output_lengths, "output_lengths") or flags.output_tokens,
    }
    source = parse_workload(document, "bench").source()
    items = []
    while source.peek() is not None:
        arrival = source.take()
        prompt = _spelled(tuple(arrival.request.prompt_token_ids), flags.vocab_size, flags.seed)
        items.append(Item(0.0, prompt, arrival.num_output_tokens))
    return "drawn", tuple(items)


def _lengths(text: str | None, flag: str) -> Any:
    """A length distribution as workload files have it; None of none.

    Raises:
      ValueError: it is not one.
    """
    if text is None:
        return None
    kind, colon, rest = text.partition(":")
    try:
        if not colon:
            value: Any = int(text)
        else:
            pairs = (pair.split("=", 1) for pair in rest.split(","))
            value = {"kind": kind} | {key: float(given) if "." in given else int(given) for key, given in pairs}
    except ValueError:
        raise ValueError(f"{flag} is {text!r}; it must be a number or KIND:FIELD=VALUE,...") from None
    parse_lengths(JsonFields({flag: value}, "flags"), flag)
    return value


def _spelled(prompt: Sequence[int], vocab_size: int, seed: int) -> tuple[int, ...]:
    """A simulated prompt, whose ids only tell prompts apart, as random ids below `vocab_size`.

    Simulated prompts are runs of one id that marks the run and of fillers (`jaxserve.sim.source.prompt_of`); equal
    runs become equal tokens, so shared beginnings stay shared.
    """
    starts = [index for index, token in enumerate(prompt) if token != OTHER_ID] or [0]
    found: list[int] = []
    for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True):
        mark = prompt[start]
        rng = np.random.default_rng([seed, 7, abs(mark), int(mark < 0)])
        found += rng.integers(0, vocab_size, end - start).tolist()
    return tuple(found)


def _with_long_prompts(items: tuple[Item, ...], every: int, num_tokens: int, seed: int) -> tuple[Item, ...]:
    if not every:
        return items
    rng = np.random.default_rng([seed, 8])
    highest = 1 + max(max(item.prompt) for item in items)
    return tuple(
        replace(item, prompt=tuple(rng.integers(0, highest, num_tokens).tolist())) if number % every == 0 else item
        for number, item in enumerate(items, 1)
    )


def _repeated(items: Sequence[Item]) -> Iterator[Item]:
    while True:
        yield from items
