"""PageAllocator: which KV pages are free, owned or kept for their content.

Page 0 is the null page, target of all padding: it is never handed out. Every other page is in one state:

    FREE ──allocate──▶ OWNED by one sequence or shared by several ──last release──▶ FREE, or CACHED if its
      ▲                  ▲                                                            content has a hash
      └──── evicted ─────┴── shared ────────────────────────── CACHED ◀──────────────────────┘

The lowest free page goes first; when none is free, the cached page that was let go longest ago. The
same calls always give the same pages.

An owner that gives pages back before its end, and needs others then, counts on finding one for each. A page that
it shares does not become available by that. So with several owners a page counts as one page for each of those, and
as one for all others together: what it counts beyond the one that it is, is `num_extra`, and may not be promised.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from jaxserve.scheduler.prefix_cache import PrefixCache


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1.

    Args:
      num_pages: pages in the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_usable = num_pages - 1
        self.cache = PrefixCache()
        self._free = list(range(1, num_pages))  # ascending, hence a heap
        self._num_owners = [0] * num_pages
        self._num_passing = [0] * num_pages  # owners that may give the page back before their end
        self._num_shared = 0  # pages with several owners
        self.num_extra = 0

    @property
    def num_free(self) -> int:
        """Pages nobody owns and whose content is worth nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages nobody owns, kept for their content until they are needed."""
        return self.cache.num_idle

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_promisable(self) -> int:
        """Pages that may be promised."""
        return len(self._free) + self.cache.num_idle - self.num_extra

    @property
    def num_owned(self) -> int:
        """Pages with an owner, each counted once."""
        return self.num_usable - self.num_available

    def allocate(self, count: int, *, passing: bool = False) -> list[int]:
        """Takes pages: the lowest free ones, then cached ones. The caller was promised them: they exist.

        Args:
          passing: the owner may give them back before its end; so below.
        """
        free, owners = self._free, self._num_owners
        assert count <= len(free) or count <= self.num_available, (
            f"{count} pages asked for, {self.num_available} available"
        )
        pop = heapq.heappop
        pages = [pop(free) if free else self.cache.evict() for _ in range(count)]
        for page in pages:
            owners[page] = 1
        if passing:
            for page in pages:
                self.will_pass(page)
        return pages

    def will_pass(self, page: int) -> None:
        """`page`, just taken, is one that its owner may give back before its end."""
        self._num_passing[page] = 1

    def share(self, pages: Iterable[int], *, passing: bool = False) -> None:
        """Adds an owner to pages that are owned or cached."""
        for page in pages:
            if not self._num_owners[page]:
                self.cache.revive(page)
            else:
                self.num_extra += self._counts_anew(page, passing)
            self._num_owners[page] += 1
            self._num_passing[page] += passing
            self._num_shared += self._num_owners[page] == 2

    def _counts_anew(self, page: int, passing: bool) -> bool:
        """Whether one more owner makes an owned page count as one page more."""
        return passing or self._num_passing[page] == self._num_owners[page]

    def release(self, pages: Sequence[int], *, passing: bool = False) -> None:
        """Takes one owner from each; the last ones of a sequence become the first to be evicted."""
        free, owners, cache, push = self._free, self._num_owners, self.cache, heapq.heappush
        for page in reversed(pages):
            left = owners[page] - 1
            assert left >= 0, f"page {page} is released and has no owner"
            owners[page] = left
            if passing:
                self._num_passing[page] -= 1
            if left:
                self._num_shared -= left == 1
                self.num_extra -= self._counts_anew(page, passing)
            elif page in cache.name_of:
                cache.retire(page)
            else:
                push(free, page)

    def num_owners(self, page: int) -> int:
        """Sequences that hold `page`."""
        return self._num_owners[page]

    def num_private(self, pages: Sequence[int], shared: Collection[int] = ()) -> int:
        """How many of `pages` have a single owner and are not among `shared`, about to have another."""
        if not self._num_shared and not shared:
            return len(pages)
        owners = self._num_owners
        private = list(map(owners.__getitem__, pages)).count(1)
        return private - sum(owners[page] == 1 for page in shared if page in pages)

    def cost_of_sharing(self, pages: Iterable[int], *, passing: bool = False) -> int:
        """By how many the pages that may be promised would become fewer if `pages` had one more owner."""
        owners = self._num_owners
        return sum(1 for page in pages if not owners[page] or self._counts_anew(page, passing))

    def forget(self, names: Iterable[bytes], num_groups: int) -> None:
        """What is known by these names is found no more; pages that were kept for it alone are free."""
        for page in self.cache.remove(names, num_groups):
            heapq.heappush(self._free, page)

    def drop_cache(self) -> None:
        """Frees every cached page and forgets the content of owned ones."""
        for page in self.cache.clear():
            heapq.heappush(self._free, page)
