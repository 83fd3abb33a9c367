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

    A name may be forgotten and numbered anew when nothing can find it any more: neither it nor one that
    follows it in its chain is in the cache or a live request's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._number_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes | None] = {}  # of the same names
        self._num_told: dict[int, int] = {}  # by arrival: pages of it already numbered
        self._next = 0
        self._limit = _SLACK

    def of_prompt(self, sequence: Sequence) -> list[int]:
        """Of the full pages of an arrival's prompt."""
        size = self._scheduler.config.page_size
        self._scheduler._name_pages(sequence, sequence.num_prompt_tokens // size)
        return self.new_of(sequence)

    def new_of(self, sequence: Sequence) -> list[int]:
        """Of the pages that were filled since the last question about this sequence."""
        names, told = sequence.page_names, self._num_told.get(sequence.arrival, 0)
        self._num_told[sequence.arrival] = len(names)
        return [self._number(names[i], names[i - 1] if i else None) for i in range(told, len(names))]

    def last_of(self, sequence: Sequence) -> list[int]:
        """`new_of` for a sequence that has ended."""
        numbers = self.new_of(sequence)
        del self._num_told[sequence.arrival]
        return numbers

    def _number(self, name: bytes, parent: bytes | None) -> int:
        number = self._number_of.get(name)
        if number is None:
            if len(self._number_of) >= self._limit:
                self._forget()
            number = self._number_of[name] = self._next
            self._parent_of[name] = parent
            self._next += 1
        return number

    def _forget(self) -> None:
        scheduler = self._scheduler
        found = [*scheduler._pages.cache._page_of]
        for sequence in scheduler._live.values():
            found += sequence.page_names
        kept: set[bytes] = set()
        for name in found:
            link: bytes | None = name
            while link in self._number_of and link not in kept:
                kept.add(link)
                link = self._parent_of[link]
        self._number_of = {name: number for name, number in self._number_of.items() if name in kept}
        self._parent_of = {name: parent for name, parent in self._parent_of.items() if name in kept}
        self._limit = 2 * len(self._number_of) + _SLACK
