"""Holding: the pages that a request has in one group of layers.

Layers lie in groups of equal size, and a page is `page_size` tokens of the layers of one group. Every group sees the
same tokens come, so a request has had equally many pages in each (`num_pages`); what it still holds differs, as a group
with a window gives back what its layers do not see any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Holding:
    """One request's share of one group.

    Attributes:
      group: its number, from 0.
      window: tokens that a query sees in its layers, its own included; 0: all.
      gives_back: some of the pages are given back before the request's end, as no layer of the group sees their tokens.
      num_passed: pages, from the first, that were given back so.
      pages: pages held, in token order, from page `num_passed` of the request's tokens on.
      host_pages: of the host pool, likewise, while the request is swapped out; it holds no others then.
      num_promised: pages it does not hold yet and will find free (see `reservations`).
    """

    group: int = 0
    window: int = 0
    gives_back: bool = False
    num_passed: int = 0
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    num_promised: int = 0

    @property
    def num_pages(self) -> int:
        """Pages it has had for its tokens: those given back and those held."""
        return self.num_passed + len(self.pages)
