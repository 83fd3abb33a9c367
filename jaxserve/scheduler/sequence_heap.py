"""SequenceHeap: sequences by key, with cheap removal from the middle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.scheduler.orders import Key
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

    def entries(self) -> Iterator[tuple[Key, Sequence]]:
        """Keys and sequences, in no order."""
        return ((entry[0], entry[2]) for entry in self._heap if self._is_live(entry))

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
