"""FairLine: a line per tenant, the tenant that has had least service first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.scheduler.orders import Key
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap
from jaxserve.scheduler.tenant_counters import TenantCounters


class FairLine:
    """Like `SequenceHeap`, with the tenant's counter, as it is at the time of asking, and name ahead of each key.

    Counters only grow while a tenant has requests, so a tenant's place among the others only moves back:
    an outdated place is noticed when it surfaces, and renewed. O(log tenants) amortised.

    Args:
      counters: shared by all lines.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._heaps: dict[str, SequenceHeap] = {}
        self._places: list[tuple[float, str]] = []  # (counter when placed, tenant), one per tenant in `_heaps`
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, sequence: Sequence) -> bool:
        heap = self._heaps.get(sequence.request.tenant)
        return heap is not None and sequence in heap

    def entries(self) -> Iterator[tuple[Key, Sequence]]:
        """Keys as of now and sequences, in no order."""
        for tenant, heap in self._heaps.items():
            for key, sequence in heap.entries():
                yield (self._counters[tenant], tenant, *key), sequence

    def push(self, key: Key, sequence: Sequence) -> None:
        """Puts in a sequence that is not in."""
        tenant = sequence.request.tenant
        if tenant not in self._heaps:
            self._heaps[tenant] = SequenceHeap()
            heapq.heappush(self._places, (self._counters[tenant], tenant))
        self._heaps[tenant].push(key, sequence)
        self._size += 1

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out; False if it is not in."""
        heap = self._heaps.get(sequence.request.tenant)
        if heap is None or not heap.remove(sequence):
            return False
        self._size -= 1
        return True

    def front(self) -> tuple[Key, Sequence] | None:
        """The first of the tenant with the least counter; None when empty."""
        while self._places:
            placed, tenant = self._places[0]
            front = self._heaps[tenant].front()
            if front is None:
                heapq.heappop(self._places)
                del self._heaps[tenant]
            elif placed < self._counters[tenant]:
                heapq.heapreplace(self._places, (self._counters[tenant], tenant))
            else:
                key, sequence = front
                return (placed, tenant, *key), sequence
        return None
