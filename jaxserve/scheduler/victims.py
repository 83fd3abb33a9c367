"""Victims: whom a preemption hits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.scheduler.sequence import Sequence

Rank = tuple[float, ...]


def _most_remaining(sequence: Sequence) -> Rank:
    """Of the lowest class the one with the most work left, then the latest arrival."""
    return (sequence.request.priority, sequence.num_remaining_tokens, sequence.arrival)


def _least_computed(sequence: Sequence) -> Rank:
    """Of the lowest class the one that loses least, then the latest arrival."""
    return (sequence.request.priority, -sequence.num_scheduled, sequence.arrival)


VICTIMS: dict[str, Callable[[Sequence], Rank]] = {"most_remaining": _most_remaining, "least_computed": _least_computed}
"""The greatest rank is hit."""


class VictimChoice:
    """Chooses among running sequences, by a rule of `VICTIMS`.

    Args:
      rule: its name.
      max_preemptions: one set back so often is never chosen.
    """

    def __init__(self, rule: str, max_preemptions: int) -> None:
        self._rank = VICTIMS[rule]
        self._max_preemptions = max_preemptions

    def protects(self, sequence: Sequence) -> bool:
        """It may not be set back again."""
        return sequence.num_setbacks >= self._max_preemptions

    def for_slot(self, newcomer: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Whose slot a newcomer may take: one of lower class; None when there is none. O(running)."""
        lower = (s for s in running if s.request.priority > newcomer.request.priority and not self.protects(s))
        return max(lower, key=self._rank, default=None)

    def for_pages(self, running: Iterable[Sequence]) -> Sequence | None:
        """Whose pages are taken when they have run out: one that gained a token since it got its slot.

        The one in need is among them: it gives way itself when it ranks lowest. O(running).
        """
        able = (s for s in running if s.has_gained and not self.protects(s))
        return max(able, key=self._rank, default=None)
