"""Recovery: whose fault a failed step is, and how much the device can take. No device, no clock, no engine.

A request is known here by a number that no other ever has (`Sequence.arrival`).

`Suspicion` finds the request that makes steps fail. Those that took part in a failed step are suspects, and are tried
again all together: most failures do not come back. Where one does, half of them are held back, then half of the rest,
until one fails alone. That one ends when it has failed alone `STRIKES` times. A suspect is cleared when it has gained
`CLEARING` tokens: the first may be one of its prompt, computed again, so the second is one of a decode row.

What fails whoever takes part is hopeless, and ends the engine: `CULPRITS` requests one after another that fail alone,
or so many failures that halving would have found somebody, without anybody cleared in between.

`TokenBudget` is for a device that has no memory for a step: half the tokens next time, and twice as many again once
steps have gone well for a while.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

STRIKES = 2
CLEARING = 2
CULPRITS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failure, or an end of suspicion, comes to.

    Attributes:
      hold: requests that are not to run for now.
      release: that may run again.
      culprit: the request that is to end; None: nobody.
      hopeless: no request is to blame.
    """

    hold: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    culprit: int | None = None
    hopeless: bool = False


NOTHING = Verdict()


class Suspicion:
    """Follows failures and what comes between them.

    Args:
      max_rows: most requests in a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_fruitless = math.ceil(math.log2(max_rows)) + 2 * CULPRITS + 2
        self._suspects: dict[int, int] = {}  # how often each has failed alone
        self._trial: set[int] = set()  # of the suspects those that are not held; what runs beside them is cleared
        self._held: list[tuple[int, ...]] = []  # groups of others, the next one to be tried last
        self._bystanders: tuple[int, ...] = ()  # no suspects, and held while one is tried alone
        self._num_fruitless = 0  # failures since somebody was cleared
        self._num_culprits = 0  # likewise

    @property
    def suspects(self) -> Collection[int]:
        """Whom to look at after each step."""
        return self._suspects.keys()

    @property
    def held(self) -> frozenset[int]:
        """Those that are not to run."""
        return frozenset(each for group in (*self._held, self._bystanders) for each in group)

    def failed(self, participants: Sequence[int]) -> Verdict:
        """A step failed.

        Args:
          participants: the requests of the plans that were in flight and are still live, in order, none of them held.
        """
        self._num_fruitless += 1
        if self._num_fruitless > self._max_fruitless:
            return Verdict(hopeless=True)
        if not participants:  # all have ended meanwhile
            return NOTHING
        again = [each for each in participants if each in self._trial]
        if not again:  # the first failure, or one of those that were cleared
            return self._begin(participants)
        alone = len(participants) == 1
        if alone:
            (only,) = participants
            self._suspects[only] += 1
            return self._end_culprit(only) if self._suspects[only] >= STRIKES else NOTHING
        if len(again) == 1:
            # Those beside it are cleared, and may yet have their part in it: it is to run alone.
            beside = tuple(each for each in participants if each not in again)
            self._bystanders += beside  # others may have been beside it before
            return Verdict(hold=beside)
        rest = tuple(again[len(again) // 2 :])
        self._held.append(rest)
        self._trial.difference_update(rest)
        return Verdict(hold=rest)

    def cleared(self, number: int) -> Verdict:
        """A suspect has gained tokens enough, or ended by itself."""
        if number not in self._suspects:
            return NOTHING
        self._num_fruitless = self._num_culprits = 0
        return Verdict(release=self._without(number))

    def gone(self, numbers: Iterable[int]) -> Verdict:
        """Requests ended for another reason, which says nothing about them."""
        released: tuple[int, ...] = ()
        for number in numbers:
            if number in self._suspects:
                released += self._without(number)
        return Verdict(release=released)

    def _begin(self, participants: Sequence[int]) -> Verdict:
        alone = len(participants) == 1
        for each in participants:
            self._suspects[each] = int(alone)
        self._trial.update(participants)
        return NOTHING

    def _end_culprit(self, number: int) -> Verdict:
        self._num_culprits += 1
        if self._num_culprits >= CULPRITS:
            return Verdict(hopeless=True)
        return Verdict(culprit=number, release=self._without(number))

    def _without(self, number: int) -> tuple[int, ...]:
        """Forgets a suspect; returns whose turn it is then, if it was the last of those that were tried."""
        del self._suspects[number]
        self._trial.discard(number)
        self._held = [kept for group in self._held if (kept := tuple(each for each in group if each != number))]
        if self._trial:
            return ()
        bystanders, self._bystanders = self._bystanders, ()
        group = self._held.pop() if self._held else ()
        self._trial = set(group)
        return bystanders + group


class TokenBudget:
    """How many tokens a step may have.

    Args:
      full: of the settings.

    Attributes:
      tokens: at most, now.
    """

    PATIENCE, MOST_PATIENCE = 32, 1024
    """Good steps before the budget grows; twice as many each time that it had grown too far, and as few as at first
    again after `MOST_PATIENCE` good steps with the full budget."""

    def __init__(self, full: int) -> None:
        self._full = full
        self._patience = self.PATIENCE
        self._num_good = 0
        self._has_grown = False
        self.tokens = full

    @property
    def is_full(self) -> bool:
        """It is that of the settings."""
        return self.tokens == self._full

    def out_of_memory(self, num_tokens: int) -> bool:
        """The device had no memory for a step of so many tokens; False where it cannot be smaller."""
        smaller = max(min(self.tokens, num_tokens) // 2, 1)
        if self._has_grown:
            self._patience = min(2 * self._patience, self.MOST_PATIENCE)
        self._num_good, self._has_grown = 0, False
        if num_tokens <= 1 or smaller >= self.tokens:
            return False
        self.tokens = smaller
        return True

    def good(self) -> bool:
        """A step came back; whether the budget has grown."""
        self._num_good += 1
        if self.is_full:
            if self._num_good >= self.MOST_PATIENCE:
                self._patience, self._has_grown = self.PATIENCE, False
            return False
        if self._num_good < self._patience:
            return False
        self._num_good, self._has_grown = 0, True
        self.tokens = min(2 * self.tokens, self._full)
        return True
