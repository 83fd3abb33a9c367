"""Arrivals: when requests come.

    poisson      rate                       gaps are exponential with mean 1 / rate
    gamma        rate, cv                   gamma distributed with that mean and coefficient of variation:
                                            cv 1 is poisson, above 1 bursty
    constant     rate                       gaps are 1 / rate
    batch        -                          all at 0
    trace        times                      as listed, seconds, ascending
    closed_loop  concurrency, think_s (0)   so many clients; each sends its next request `think_s` after its
                                            last one ended

The first request of an open loop comes one gap after 0. Gaps are drawn with mean 1 and divided by the rate:
at another rate the same pattern comes faster or slower. A client of a closed loop that is refused waits
as long as the refusal says (Retry-After) before its next request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sim.json_fields import JsonFields, is_finite
from jaxserve.sim.source import Arrival

KINDS = ("poisson", "gamma", "constant", "batch", "trace", "closed_loop")
_WITH_RATE = ("poisson", "gamma", "constant")
_BLOCK = 1024

Maker = Callable[[float], Arrival]
"""Makes the next request of a workload, given the instant of its arrival."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The `arrivals` of a workload file, checked."""

    kind: str
    rate: float | None = None
    cv: float = 1.0
    times: tuple[float, ...] = ()
    concurrency: int = 0
    think_s: float = 0.0

    def at_rate(self, rate: float) -> Arrivals:
        """The same at another rate; a batch becomes poisson.

        Raises:
          ValueError: a closed loop has no rate to set.
        """
        if self.kind == "closed_loop":
            raise ValueError(
                "arrivals are closed_loop, whose rate follows from the system; sweep a workload with poisson,"
                " gamma, constant, batch or trace arrivals"
            )
        if self.kind == "trace" and (own := self.natural_rate):
            return replace(self, times=tuple(at * own / rate for at in self.times))
        return replace(self, kind=self.kind if self.kind in _WITH_RATE else "poisson", rate=rate, times=())

    @property
    def natural_rate(self) -> float | None:
        """Requests per second, where the arrivals themselves have one."""
        if self.kind == "trace":
            span = self.times[-1] - self.times[0] if self.times else 0.0
            return (len(self.times) - 1) / span if span > 0.0 else None
        return self.rate

    def instants(self, seed: int) -> Iterator[float]:
        """Of an open loop; endless but for a trace."""
        if self.kind == "trace":
            yield from self.times
            return
        rng, now = np.random.default_rng([seed, 0]), 0.0
        while True:
            for gap in self._gaps(rng).tolist():
                now += gap / self.rate if self.rate else 0.0
                yield now

    def _gaps(self, rng: np.random.Generator) -> np.ndarray:
        if self.kind == "gamma":
            shape = 1.0 / self.cv**2
            return rng.gamma(shape, 1.0 / shape, _BLOCK)
        return rng.exponential(1.0, _BLOCK) if self.kind == "poisson" else np.ones(_BLOCK)


def parse_arrivals(fields: JsonFields) -> Arrivals:
    """Reads an `arrivals` object.

    Raises:
      ValueError: naming the field and the rule it breaks.
    """
    kind = fields.choice("kind", KINDS)
    arrivals = Arrivals(kind)
    if kind in _WITH_RATE:
        arrivals = replace(arrivals, rate=fields.number("rate", above=0.0))
    if kind == "gamma":
        arrivals = replace(arrivals, cv=fields.number("cv", above=0.0))
    if kind == "closed_loop":
        arrivals = replace(
            arrivals, concurrency=fields.integer("concurrency", 1), think_s=fields.number("think_s", 0.0, low=0.0)
        )
    if kind == "trace":
        arrivals = replace(arrivals, times=_times(fields))
    fields.close()
    return arrivals


class ClosedLoop:
    """A source whose arrivals follow ends: `concurrency` clients, each with one request at a time.

    Args:
      makers: of the requests, in order of arrival; when they run out the clients stop.
    """

    def __init__(self, makers: Iterator[Maker], concurrency: int, think_s: float) -> None:
        self._makers = makers
        self._think_s = think_s
        self._instants = [0.0] * concurrency  # a heap
        self._next = next(makers, None)

    def peek(self) -> float | None:
        """When the next client is ready; None while all wait, or when nothing is left to send."""
        return self._instants[0] if self._instants and self._next is not None else None

    def take(self) -> Arrival:
        """That client's request."""
        maker = self._next
        assert maker is not None, "no request is left"
        self._next = next(self._makers, None)
        return maker(heapq.heappop(self._instants))

    def ended(self, now: float, retry_after_s: float | None = None) -> None:
        """Its client thinks, or waits as it was told."""
        heapq.heappush(self._instants, now + max(self._think_s, retry_after_s or 0.0))


def _times(fields: JsonFields) -> tuple[float, ...]:
    times = fields.items("times")
    last = 0.0
    for index, at in enumerate(times):
        if isinstance(at, bool) or not isinstance(at, int | float) or not (last <= at and is_finite(at)):
            name = fields.name_of(f"times[{index}]")
            raise ValueError(f"{name} is {at!r}; it must be a finite number of at least {last:g}: times ascend from 0")
        last = float(at)
    return tuple(map(float, times))
