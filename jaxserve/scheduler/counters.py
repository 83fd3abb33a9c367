"""Counters: what became of the requests; and the pace at which they leave."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jaxserve.core import FinishReason


@dataclass(slots=True)
class Counters:
    """Since the start. offered = completed + rejected + expired + aborted + failed + live, at any time.

    `recomputed_tokens` lost their K/V to a preemption, `cached_tokens` were found in the prefix cache;
    `swapped_pages` were copied to the host or back. `wasted_rows`, decode rows and chunks, were of requests that had
    ended when their step came back. `recoveries`: calls of `recover`.
    """

    offered: int = 0
    completed: int = 0
    expired: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    wasted_rows: int = 0
    recoveries: int = 0
    recomputed_tokens_of: dict[str, int] = field(default_factory=dict)  # by service class
    swapped_pages_of: dict[str, int] = field(default_factory=dict)  # likewise
    rejected: dict[str, int] = field(default_factory=dict)  # by reason

    @property
    def recomputed_tokens(self) -> int:
        """Over all service classes."""
        return sum(self.recomputed_tokens_of.values())

    @property
    def swapped_pages(self) -> int:
        """Over all service classes."""
        return sum(self.swapped_pages_of.values())

    @property
    def num_rejected(self) -> int:
        """Over all reasons."""
        return sum(self.rejected.values())

    @property
    def num_ended(self) -> int:
        """Requests that are no longer live, the rejected included."""
        return self.completed + self.expired + self.aborted + self.failed + self.num_rejected

    def count_recomputed(self, service_class: str, num_tokens: int) -> None:
        """A preemption made so many tokens worthless."""
        self.recomputed_tokens_of[service_class] = self.recomputed_tokens_of.get(service_class, 0) + num_tokens

    def count_swapped(self, service_class: str, num_pages: int) -> None:
        """So many pages go to the host or come back."""
        self.swapped_pages_of[service_class] = self.swapped_pages_of.get(service_class, 0) + num_pages

    def count_rejection(self, reason: str) -> None:
        """One more refused for `reason`."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def count_end(self, reason: FinishReason) -> None:
        """One live request more has ended."""
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.completed += 1
            case FinishReason.ABORT:
                self.aborted += 1
            case FinishReason.EXPIRED:
                self.expired += 1
            case FinishReason.ERROR | FinishReason.UNFOLLOWABLE:
                self.failed += 1
            case FinishReason.DISPLACED:
                self.count_rejection("displaced")


class DepartureRate:
    """How fast requests and their tokens leave, from the last departures: the basis of Retry-After."""

    WINDOW = 64
    SETTLED = 8
    DEFAULT_S = 1.0
    MIN_S, MAX_S = 0.1, 120.0

    def __init__(self) -> None:
        self._departures: deque[tuple[float, int]] = deque(maxlen=self.WINDOW)
        self._tokens = 0

    def observe(self, now: float, num_tokens: int) -> None:
        """A request that counted `num_tokens` against the bounds has left."""
        if len(self._departures) == self.WINDOW:
            self._tokens -= self._departures[0][1]
        self._departures.append((now, num_tokens))
        self._tokens += num_tokens

    @property
    def is_settled(self) -> bool:
        """Enough have left for the pace to mean something."""
        return len(self._departures) >= self.SETTLED

    def seconds_until(self, num_requests: int, num_tokens: int, now: float) -> float:
        """When so many requests holding so many tokens should have left, at the observed pace.

        The window ends at `now`, not at the last departure: while nothing leaves, the answer grows.
        """
        if not self._departures:
            return self.DEFAULT_S
        elapsed = now - self._departures[0][0]
        if elapsed <= 0.0:
            return self.DEFAULT_S if len(self._departures) == 1 else self.MIN_S
        for_requests = num_requests * elapsed / len(self._departures)
        for_tokens = num_tokens * elapsed / max(self._tokens, 1)
        return min(max(for_requests, for_tokens, self.MIN_S), self.MAX_S)
