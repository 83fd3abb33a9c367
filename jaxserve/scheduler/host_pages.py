"""HostPages: which pages of the host pool are free. They hold K/V of requests that were swapped out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class HostPages:
    """Hands out pages 0 .. num_pages - 1, the lowest free one first.

    Args:
      num_pages: pages in the host pool; 0: there is none.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))  # ascending, hence a heap

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes pages; the caller has made sure that so many are free."""
        assert count <= len(self._free), f"{count} host pages asked for, {len(self._free)} are free"
        return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            heapq.heappush(self._free, page)
