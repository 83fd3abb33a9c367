"""SlotPool: which rows of the decode table are free. The lowest free slot goes first."""

from __future__ import annotations

import heapq


class SlotPool:
    """Hands out slots 0 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))  # ascending, hence a heap

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot."""
        assert self._free, "no slot is free"
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        """Returns a slot."""
        heapq.heappush(self._free, slot)
