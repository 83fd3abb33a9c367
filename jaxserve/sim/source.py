"""Sources: where requests come from, in order of time.

A source is asked for the instant of its next arrival before it is asked for the request, and is told of
every end, so that arrivals may depend on ends (closed loop) and a million requests never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from jaxserve.core import Request, SamplingParams

STOP_ID = 1
"""The token with which a request ends before `max_tokens`."""
OTHER_ID = 0
"""Every other sampled token."""
_PARAMS = SamplingParams(ignore_eos=True)
_STOPPING = SamplingParams(stop_token_ids=(STOP_ID,), ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Attributes:
      at: instant, seconds.
      request: as the scheduler gets it.
      num_output_tokens: after which it ends; 0 or more, at most `request.max_tokens`.
      class_name: under which the report counts it.
      asked_at: instant from which its latencies count, where it was elsewhere before; None: `at`.
    """

    at: float
    request: Request
    num_output_tokens: int
    class_name: str
    asked_at: float | None = None


class Source(Protocol):
    """Arrivals in order of time."""

    def peek(self) -> float | None:
        """Instant of the next arrival; None while there is none, or none before a request ends."""

    def take(self) -> Arrival:
        """The arrival that `peek` announced."""

    def ended(self, now: float, retry_after_s: float | None = None) -> None:
        """A request ended or was refused; a refusal may say when to come again."""


class TimedSource:
    """Arrivals whose instants do not depend on the system: an open loop.

    Args:
      arrivals: in order of time.
    """

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._next = next(arrivals, None)

    def peek(self) -> float | None:
        """Instant of the next."""
        return None if self._next is None else self._next.at

    def take(self) -> Arrival:
        """The next; checks that time does not run backwards."""
        arrival = self._next
        assert arrival is not None, "no arrival is left"
        self._next = next(self._arrivals, None)
        assert self._next is None or self._next.at >= arrival.at, f"{self._next} comes before {arrival}"
        return arrival

    def ended(self, now: float, retry_after_s: float | None = None) -> None:
        """Of no interest."""


def make_request(
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    num_output_tokens: int,
    *,
    max_tokens: int | None = None,
    priority: int = 0,
    tenant: str = "",
    service_class: str = "",
    deadline_at: float | None = None,
) -> Request:
    """A free-running request that emits `num_output_tokens`, by a stop id where it declares more (`max_tokens`)."""
    granted = num_output_tokens if max_tokens is None else max(max_tokens, num_output_tokens)
    return Request(
        request_id,
        prompt_token_ids,
        params=_PARAMS if granted == num_output_tokens else _STOPPING,
        max_tokens=granted,
        priority=priority,
        tenant=tenant,
        service_class=service_class,
        deadline_at=deadline_at,
        free_running=True,
    )


def prompt_of(number: int, num_tokens: int, *, group: int = 0, num_shared: int = 0) -> tuple[int, ...]:
    """A prompt unlike every other from its first token of its own on.

    Args:
      number: of the request.
      num_tokens: its length.
      group: of requests that share their beginning.
      num_shared: tokens in that beginning; at most `num_tokens` count.
    """
    shared = min(num_shared, num_tokens)
    beginning = (-1 - group, *(OTHER_ID,) * (shared - 1)) if shared else ()
    own = num_tokens - shared
    return (*beginning, *((number + 2, *(OTHER_ID,) * (own - 1)) if own else ()))
