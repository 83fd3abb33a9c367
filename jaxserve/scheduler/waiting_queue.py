"""The waiting queue: bounded in requests and tokens, ordered by the policy, cheap to leave from anywhere.

It is one line per service class. A class at its slot limit is passed over, and nobody of another class
waits behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.scheduler.fair_line import FairLine
from jaxserve.scheduler.orders import Order
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap


class _Line:
    """The waiting requests of one class, and its bounds."""

    def __init__(self, order: Order, limits: ServiceClass | None) -> None:
        self.heap = SequenceHeap() if order.counters is None else FairLine(order.counters)
        self.num_tokens = 0
        self._limits = limits

    def refusal(self, num_tokens: int) -> str | None:
        """Which bound of the class one more request of `num_tokens` would break."""
        limits = self._limits
        if limits is None:
            return None
        if limits.max_queue_requests is not None and len(self.heap) >= limits.max_queue_requests:
            return "queue_full_class_requests"
        if limits.max_queue_tokens is not None and self.num_tokens + num_tokens > limits.max_queue_tokens:
            return "queue_full_class_tokens"
        return None


class WaitingQueue:
    """Requests without a slot: fresh ones, and preempted ones.

    All bounds hold at all times; a preempted request counts like any other.

    Args:
      config: bounds and service classes.
      order: who is promoted first.
      class_is_full: whether a class may take no further slot.
    """

    def __init__(self, config: SchedulerConfig, order: Order, class_is_full: Callable[[str], bool]) -> None:
        self._max_requests = config.max_queue_requests
        self._max_tokens = config.max_queue_tokens
        self._order = order
        self._class_is_full = class_is_full
        self._lines = {"": _Line(order, None)} | {c.name: _Line(order, c) for c in config.service_classes}
        # Who is displaced first: the lowest class, there the latest arrival.
        self._by_rank = SequenceHeap() if config.queue_displacement else None
        self._paused = SequenceHeap()  # those of the lines that kept their pages
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lines[sequence.request.service_class].heap

    def __iter__(self) -> Iterator[Sequence]:
        """In promotion order as of now; sorts, so for traces and checks only."""
        entries = [entry for line in self._lines.values() for entry in line.heap.entries()]
        return (sequence for _, sequence in sorted(entries, key=lambda entry: entry[0]))

    @property
    def is_beyond_bound(self) -> bool:
        """Requests that lost their pages came back to a full queue."""
        return self._num_requests > self._max_requests

    def refusal(self, sequence: Sequence) -> str | None:
        """Which bound `sequence` would break, as a rejection reason; None when there is room."""
        if self._num_requests >= self._max_requests:
            return "queue_full_requests"
        if self.num_tokens + sequence.max_total_tokens > self._max_tokens:
            return "queue_full_tokens"
        return self._lines[sequence.request.service_class].refusal(sequence.max_total_tokens)

    def push(self, sequence: Sequence) -> None:
        """Puts in a sequence for which `refusal` is None."""
        line = self._lines[sequence.request.service_class]
        line.heap.push(self._order.key(sequence), sequence)
        if sequence.num_preemptions and not sequence.restarted and not sequence.host_pages:
            self._paused.push(self._order.key(sequence), sequence)
        if self._by_rank is not None and not sequence.num_preemptions:
            self._by_rank.push((-sequence.request.priority, -sequence.arrival), sequence)
        line.num_tokens += sequence.max_total_tokens
        self.num_tokens += sequence.max_total_tokens
        self._num_requests += 1

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out, from anywhere; False if it is not waiting."""
        line = self._lines[sequence.request.service_class]
        if not line.heap.remove(sequence):
            return False
        if self._by_rank is not None:
            self._by_rank.remove(sequence)
        self._paused.remove(sequence)
        line.num_tokens -= sequence.max_total_tokens
        self.num_tokens -= sequence.max_total_tokens
        self._num_requests -= 1
        return True

    def front(self) -> Sequence | None:
        """The next to be promoted, classes at their slot limit left out."""
        fronts = [
            front
            for name, line in self._lines.items()
            if (front := line.heap.front()) and not self._class_is_full(name)
        ]
        return min(fronts, key=lambda front: front[0])[1] if fronts else None

    def paused(self) -> Sequence | None:
        """The first of those that kept their pages, unless its class is at its slot limit."""
        front = self._paused.front()
        return front[1] if front and not self._class_is_full(front[1].request.service_class) else None

    def would_lead(self, sequence: Sequence) -> bool:
        """Whether nobody that could be promoted waits ahead of `sequence`."""
        front = self.front()
        return front is None or self._order.place(sequence) < self._order.place(front)

    def displaceable(self, sequence: Sequence) -> Sequence | None:
        """Whose place a refused `sequence` may take, where displacement is on.

        It is the fresh request of the lowest class, if that is below the sequence's and its leaving makes room.
        """
        front = self._by_rank.front() if self._by_rank is not None else None
        if front is None or front[1].request.priority <= sequence.request.priority:
            return None
        other = front[1]
        excess = self.num_tokens + sequence.max_total_tokens - self._max_tokens
        line = self._lines[sequence.request.service_class]
        if excess > other.max_total_tokens or line.refusal(sequence.max_total_tokens):
            return None
        return other
