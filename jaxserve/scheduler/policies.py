"""Policies: small pure objects that answer one question each.

| question                                   | protocol      | today            |
| who is promoted first                      | `Order`       | `Fcfs`           |
| may this request be admitted, page-wise    | `Reservation` | `Guaranteed`     |
| who gives up a slot to a higher class      | `Preemption`  | `Pause`          |

A policy sees sequences and counts, never the clock's source, the queue or the allocator, and it breaks
every tie by arrival number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler.sequence import Sequence

Key = tuple[float, ...]
"""Sorts sequences; ends in the arrival number, so no two are equal."""


class Order(Protocol):
    """Who is promoted first."""

    def key(self, sequence: Sequence) -> Key:
        """Least first; fixed from the moment the sequence starts waiting."""


class Reservation(Protocol):
    """Whether a request may start, and what is set aside for it."""

    num_reserved: int

    def pages_needed(self, request: Request) -> int:
        """Pages that must exist in the whole pool for `request` ever to run."""

    def reserve(self, sequence: Sequence) -> bool:
        """Sets pages aside for `sequence`, or changes nothing and returns False."""

    def release(self, sequence: Sequence) -> None:
        """Undoes `reserve`, whenever its pages are free again."""


class Preemption(Protocol):
    """Who gives up a slot."""

    def victim(self, newcomer: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Whose slot `newcomer` may take; None when it may take none."""


class Fcfs:
    """First come, first served; preempted requests stand in front of those that never ran."""

    def key(self, sequence: Sequence) -> Key:
        """(never ran, arrival)."""
        return (float(sequence.num_preemptions == 0), sequence.arrival)


class Guaranteed:
    """Prompt and declared output are set aside at admission, so a running request never lacks a page.

    Nothing is ever evicted for want of memory; the price is pages that stop ids leave unused.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._page_size = config.page_size
        self._num_usable = config.num_pages - 1
        self.num_reserved = 0

    def pages_needed(self, request: Request) -> int:
        """Pages of prompt + max_tokens."""
        return -(-(request.num_prompt_tokens + request.max_tokens) // self._page_size)

    def reserve(self, sequence: Sequence) -> bool:
        """True at once for a sequence that kept its reservation through a pause."""
        if sequence.num_reserved_pages:
            return True
        count = self.pages_needed(sequence.request)
        if self.num_reserved + count > self._num_usable:
            return False
        sequence.num_reserved_pages = count
        self.num_reserved += count
        return True

    def release(self, sequence: Sequence) -> None:
        """Gives back what `reserve` set aside; nothing for one that never was admitted."""
        self.num_reserved -= sequence.num_reserved_pages
        sequence.num_reserved_pages = 0


class Pause:
    """The victim gives up its slot and keeps its pages: it resumes where it stopped, nothing is recomputed.

    Victim: of the classes below the newcomer's the lowest, there the one with the most remaining work,
    there the latest arrival.
    """

    def victim(self, newcomer: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """O(running)."""
        lower = (s for s in running if s.request.priority > newcomer.request.priority)
        return max(lower, key=lambda s: (s.request.priority, s.num_remaining_tokens, s.arrival), default=None)


ORDERS: dict[str, Callable[[SchedulerConfig], Order]] = {"fcfs": lambda _: Fcfs()}
RESERVATIONS: dict[str, Callable[[SchedulerConfig], Reservation]] = {"guaranteed": Guaranteed}
PREEMPTIONS: dict[str, Callable[[SchedulerConfig], Preemption]] = {"pause": lambda _: Pause()}
