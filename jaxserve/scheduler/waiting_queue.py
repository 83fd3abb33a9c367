"""The waiting queue: bounded in requests and tokens, ordered by the policy, cheap to leave from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.policies import Key, Order
from jaxserve.scheduler.sequence import Sequence


class SequenceHeap:
    """Sequences by ascending key: O(log n) in, O(log n) amortised out, from the middle too.

    A removed sequence's entry stays in the heap until it surfaces or until dead entries outnumber live
    ones, when the heap is rebuilt. A ticket per push tells a live entry from a dead one, so a sequence
    may leave and come back. Keys end in the arrival number and are therefore never equal between
    two sequences.
    """

    _SLACK = 16

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._tickets: dict[int, int] = {}  # arrival number -> ticket of the live entry
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._tickets

    def __iter__(self) -> Iterator[Sequence]:
        """In key order; sorts, so for traces and checks only."""
        return (entry[2] for entry in sorted(self._heap, key=lambda e: e[:2]) if self._is_live(entry))

    def push(self, key: Key, sequence: Sequence) -> None:
        """Puts in a sequence that is not in."""
        assert sequence not in self, f"{sequence.request_id} is already in"
        heapq.heappush(self._heap, (key, self._next_ticket, sequence))
        self._tickets[sequence.arrival] = self._next_ticket
        self._next_ticket += 1

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out; False if it is not in."""
        if self._tickets.pop(sequence.arrival, None) is None:
            return False
        if len(self._heap) > 2 * len(self._tickets) + self._SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def front(self) -> tuple[Key, Sequence] | None:
        """The least key and its sequence; None when empty."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        key, _, sequence = self._heap[0]
        return key, sequence

    def _is_live(self, entry: tuple[Key, int, Sequence]) -> bool:
        return self._tickets.get(entry[2].arrival) == entry[1]


class WaitingQueue:
    """Requests without a slot: fresh ones, and preempted ones that keep their pages.

    Both bounds hold at all times; a preempted request counts like any other.
    """

    def __init__(self, config: SchedulerConfig, order: Order) -> None:
        self._max_requests = config.max_queue_requests
        self._max_tokens = config.max_queue_tokens
        self._order = order
        self._heap = SequenceHeap()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._heap

    def __iter__(self) -> Iterator[Sequence]:
        """In promotion order; sorts, so for traces and checks only."""
        return iter(self._heap)

    def refusal(self, sequence: Sequence) -> str | None:
        """Which bound `sequence` would break, as a rejection reason; None when there is room."""
        if len(self._heap) >= self._max_requests:
            return "queue_full_requests"
        if self.num_tokens + sequence.max_total_tokens > self._max_tokens:
            return "queue_full_tokens"
        return None

    def push(self, sequence: Sequence) -> None:
        """Puts in a sequence for which `refusal` is None."""
        self._heap.push(self._order.key(sequence), sequence)
        self.num_tokens += sequence.max_total_tokens

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out, from anywhere; False if it is not waiting."""
        if not self._heap.remove(sequence):
            return False
        self.num_tokens -= sequence.max_total_tokens
        return True

    def front(self) -> Sequence | None:
        """The next to be promoted."""
        front = self._heap.front()
        return front[1] if front else None

    def would_lead(self, sequence: Sequence) -> bool:
        """Whether nobody waits ahead of `sequence`."""
        front = self._heap.front()
        return front is None or self._order.key(sequence) < front[0]
