"""PageAllocator: which KV pages are free.

Page 0 is the null page, target of all padding: it is never handed out. Every other page is either free
or owned by exactly one sequence. The lowest free page goes first, so the same calls always give the
same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1.

    Args:
      num_pages: pages in the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_usable = num_pages - 1
        self._free = list(range(1, num_pages))  # ascending, hence a heap
        self._is_free = bytearray([0]) + bytearray([1]) * self.num_usable

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Pages handed out."""
        return self.num_usable - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes the `count` lowest free pages, ascending. The caller reserved them: they exist."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Returns pages; none of them may be free already."""
        for page in pages:
            assert 0 < page <= self.num_usable, f"page {page} is not in 1..{self.num_usable}"
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            heapq.heappush(self._free, page)

    def is_free(self, page: int) -> bool:
        """Whether nobody owns `page`; False for the null page."""
        return bool(self._is_free[page])
