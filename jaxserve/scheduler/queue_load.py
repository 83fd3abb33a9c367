"""QueueLoad: the bounds of the waiting queue, and how much of them is used."""

from __future__ import annotations

from copy import copy

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.sequence import Sequence


class QueueLoad:
    """How much waits, in all and by class, against the bounds: numbers alone, so that a copy can look ahead.

    Args:
      config: bounds and service classes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limits = {c.name: c for c in config.service_classes}
        self.num_requests = self.num_tokens = 0
        self._requests_of: dict[str, int] = dict.fromkeys(self._limits, 0)
        self._tokens_of: dict[str, int] = dict.fromkeys(self._limits, 0)

    def copy(self) -> QueueLoad:
        """One that changes apart from this one."""
        other = copy(self)
        other._requests_of, other._tokens_of = dict(self._requests_of), dict(self._tokens_of)
        return other

    def add(self, sequence: Sequence) -> None:
        """It waits."""
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        self._count(sequence, -1)

    def refusal(self, sequence: Sequence) -> str | None:
        """Which bound one more `sequence` would break, as a rejection reason; None when there is room."""
        if self.num_requests >= self._config.max_queue_requests:
            return "queue_full_requests"
        if self.num_tokens + sequence.max_total_tokens > self._config.max_queue_tokens:
            return "queue_full_tokens"
        return self._refusal_of_class(sequence)

    def makes_room(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether a refused `sequence` may have the place of `other`, who waits: of lower class, and large enough."""
        excess = self.num_tokens + sequence.max_total_tokens - self._config.max_queue_tokens
        lower = other.request.priority > sequence.request.priority
        return lower and excess <= other.max_total_tokens and self._refusal_of_class(sequence) is None

    def _refusal_of_class(self, sequence: Sequence) -> str | None:
        name = sequence.request.service_class
        limits = self._limits.get(name)
        if limits is None:
            return None
        if limits.max_queue_requests is not None and self._requests_of[name] >= limits.max_queue_requests:
            return "queue_full_class_requests"
        if (
            limits.max_queue_tokens is not None
            and self._tokens_of[name] + sequence.max_total_tokens > limits.max_queue_tokens
        ):
            return "queue_full_class_tokens"
        return None

    def _count(self, sequence: Sequence, sign: int) -> None:
        tokens, name = sign * sequence.max_total_tokens, sequence.request.service_class
        self.num_requests += sign
        self.num_tokens += tokens
        if name in self._limits:
            self._requests_of[name] += sign
            self._tokens_of[name] += tokens
