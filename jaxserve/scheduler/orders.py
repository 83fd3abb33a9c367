"""Orders: who is promoted first.

| name       | least first                                                | for                            |
|------------|------------------------------------------------------------|--------------------------------|
| `fcfs`     | preempted, then arrival                                    | the default: no surprises      |
| `priority` | priority, less waiting time                                | classes of importance          |
| `sjf`      | predicted work, less waiting time                          | low mean latency               |
| `edf`      | deadline                                                   | requests with deadlines        |
| `fair`     | service its tenant has had, then as `fcfs`                 | tenants that must not crowd    |

Waiting counts the same for everybody, so "less waiting time" never changes who of two is first: the key
is fixed when a sequence starts waiting and the queue needs no re-sorting. It also bounds waiting: what
arrives late enough stands behind, whatever its class or length.

An order sees sequences and what they were given, never the clock's source, the queue or the pages. Keys
end in the arrival number, so no two are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.length_estimator import LengthEstimator
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.tenant_counters import TenantCounters

Key = tuple[Any, ...]
"""Sorts sequences; ends in the arrival number, so no two are equal."""


class Order:
    """First come, first served; preempted requests stand in front of those that never ran.

    Args:
      config: its settings.
      lengths: of outputs observed so far.
    """

    counters: TenantCounters | None = None
    """Service of each tenant, where the order goes by it."""

    def __init__(self, config: SchedulerConfig, lengths: LengthEstimator) -> None:
        self._config = config
        self._lengths = lengths

    def key(self, sequence: Sequence) -> Key:
        """(never ran, arrival); least first, fixed from the moment the sequence starts waiting."""
        return (sequence.num_preemptions == 0, sequence.arrival)

    def place(self, sequence: Sequence) -> Key:
        """Where it stands among all as of now: its tenant's service, where that counts, then `key`."""
        if self.counters is None:
            return self.key(sequence)
        tenant = sequence.request.tenant
        return (self.counters[tenant], tenant, *self.key(sequence))


class PriorityOrder(Order):
    """By priority; each `priority_aging_s` of waiting outweighs one point of it."""

    def key(self, sequence: Sequence) -> Key:
        """(arrival time + priority as seconds, arrival)."""
        aged = sequence.arrived_at + sequence.request.priority * self._config.priority_aging_s
        return (aged, sequence.arrival)


class ShortestJobFirst(Order):
    """By predicted remaining work; each second of waiting outweighs `sjf_aging_tokens_per_s` of it.

    Predicted are the remaining prompt and the median of observed outputs, at most `max_tokens`.
    """

    def key(self, sequence: Sequence) -> Key:
        """(arrival time + work as seconds, arrival)."""
        output = self._lengths.expected(0.5, len(sequence.output_token_ids), sequence.request.max_tokens)
        work = max(sequence.num_prompt_tokens + output - sequence.num_scheduled, 0)
        return (sequence.arrived_at + work / self._config.sjf_aging_tokens_per_s, sequence.arrival)


class EarliestDeadlineFirst(Order):
    """By deadline; a request without one has it `edf_default_s` after its arrival."""

    def key(self, sequence: Sequence) -> Key:
        """(deadline, arrival)."""
        deadline = sequence.request.deadline_at
        if deadline is None:
            deadline = sequence.arrived_at + self._config.edf_default_s
        return (deadline, sequence.arrival)


class Fair(Order):
    """The tenant that has had least service first; within a tenant first come, first served.

    Service is counted as in the virtual token counter of Sheng et al., "Fairness in Serving Large
    Language Models" (OSDI 2024): a weight per prompt token and one per output token, and a tenant that
    comes back is lifted to the level of those that stayed.
    """

    def __init__(self, config: SchedulerConfig, lengths: LengthEstimator) -> None:
        super().__init__(config, lengths)
        self.counters = TenantCounters(config.fair_input_weight, config.fair_output_weight)


ORDERS: dict[str, Callable[[SchedulerConfig, LengthEstimator], Order]] = {
    "fcfs": Order,
    "priority": PriorityOrder,
    "sjf": ShortestJobFirst,
    "edf": EarliestDeadlineFirst,
    "fair": Fair,
}
