"""PageOrdinals: numbers that tell which pages of which requests have equal content, and nothing of the content.

What the prefix cache finds depends on tokens, and a trace holds none. It holds a number per full page
instead: equal page names, equal numbers. Numbers count up from 0 in the order in which names are seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

_SLACK = 1024


class PageOrdinals:
    """Numbers the pages of a scheduler's requests.

    A name that is neither in the cache nor a live request's may be forgotten and numbered anew: nothing can
    find the old one any more. But not the name of a page before one that is kept: the cache may have evicted
    the earlier page alone, and once the same tokens fill it again the later one is found.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._number_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes | None] = {}  # of each numbered name: the name of the page before
        self._tenant_of: dict[bytes, str] = {}  # of each numbered name without a page before
        self._num_told: dict[int, int] = {}  # by arrival: pages of it already numbered
        self._next = 0
        self._limit = _SLACK

    def new_of(self, sequence: Sequence) -> list[int]:
        """Of the pages that were filled since the last question about this sequence; at first its prompt's.

        The last token sampled fills none: its K and V are not written yet.
        """
        filled = max(sequence.num_prompt_tokens, sequence.num_known_tokens - 1)
        # The scheduler names pages when it needs to, which may be in a call that no record tells of.
        self._scheduler._name_pages(sequence, filled // self._scheduler.config.page_size)
        names, first = sequence.page_names, self._num_told.get(sequence.arrival, 0)
        self._num_told[sequence.arrival] = len(names)
        tenant = sequence.request.tenant
        return [
            self._number(names[index], names[index - 1] if index else None, tenant)
            for index in range(first, len(names))
        ]

    def last_of(self, sequence: Sequence) -> list[int]:
        """`new_of` for a sequence that has ended."""
        numbers = self.new_of(sequence)
        del self._num_told[sequence.arrival]
        return numbers

    def _number(self, name: bytes, parent: bytes | None, tenant: str) -> int:
        number = self._number_of.get(name)
        if number is None:
            if len(self._number_of) >= self._limit:
                self._forget(parent)
            number = self._number_of[name] = self._next
            self._parent_of[name] = parent
            if parent is None:
                self._tenant_of[name] = tenant
            self._next += 1
        return number

    def _forget(self, parent: bytes | None) -> None:
        """Drops the names that nothing can find any more; `parent` is of the name to be numbered next."""
        scheduler = self._scheduler
        kept: set[bytes] = set()
        for name in (parent, *scheduler._pages.cache.names):
            self._keep(name, kept)
        for sequence in scheduler._live.values():
            kept.update(sequence.page_names)
        self._number_of = {name: number for name, number in self._number_of.items() if name in kept}
        self._parent_of = {name: parent for name, parent in self._parent_of.items() if name in kept}
        self._tenant_of = {name: tenant for name, tenant in self._tenant_of.items() if name in kept}
        self._limit = 2 * len(self._number_of) + _SLACK

    def _keep(self, name: bytes | None, kept: set[bytes]) -> None:
        """Adds a name and those of the pages before it."""
        while name is not None and name not in kept:
            kept.add(name)
            name = self._parent_of.get(name)
