"""Reservations: whether a request may start, and which pages are promised to it.

| name         | promised at admission                            | pages can run out |
|--------------|--------------------------------------------------|-------------------|
| `guaranteed` | prompt and all of `max_tokens`                   | no                |
| `exact`      | what the worst moment of the running set needs   | no                |
| `expected`   | prompt and a quantile of observed outputs        | yes, rarely       |
| `optimistic` | prompt and one token                             | yes               |

A promised page is one the sequence does not hold yet but must find free when it comes to need it. So the
promises of all never exceed the pages that are free or could be (`PageAllocator.num_promisable`); taking a
promised page lowers both sides by one. Where pages can run out, `grow` asks for one more at a time and the
scheduler preempts when it is refused. One that may not be preempted again is promised everything, whatever
the policy.

A sequence is promised pages in each group of layers (`holding`). In a group with a sliding window it gives pages back
while it runs. What is promised there is what it holds at once: while it computes its prompt the pages that a chunk and
the window before it span, and what a token and its window span once it decodes. Each page it gives back raises what is
available, and its promise by as much, as long as it will hold so many again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler.holding import Holding
from jaxserve.scheduler.length_estimator import LengthEstimator
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.peak import peak_of_additional_pages
from jaxserve.scheduler.prefix_cache import Found
from jaxserve.scheduler.sequence import Sequence


class Reservation:
    """Promises prompt and `max_tokens`: a running request never lacks a page, nothing is evicted for one.

    The price is pages that stop ids leave unused.

    Args:
      config: page size and settings.
      pages: the pool.
      lengths: of outputs observed so far.
    """

    grows = False
    """Whether a running sequence may come to need pages that were not promised at admission."""

    def __init__(self, config: SchedulerConfig, pages: PageAllocator, lengths: LengthEstimator) -> None:
        self._config = config
        self._page_size = config.page_size
        self._chunk = min(config.prefill_chunk, config.max_num_batched_tokens)
        self._num_groups = len(config.windows)
        self._spanned_by_token = {window: config.pages_spanned(1, window) for window in config.windows}
        self._pages = pages
        self._lengths = lengths
        self.num_promised = 0

    def pages_needed(self, request: Request) -> int:
        """Pages that must exist in the whole pool for `request` ever to run, outputs computed again as prompts too."""
        return self._config.pages_needed(request.num_prompt_tokens + request.max_tokens)

    def reserve(
        self,
        sequence: Sequence,
        running: Collection[Sequence],
        *,
        victim: Sequence | None = None,
        found: Items[Found] | None = None,
    ) -> bool:
        """Promises pages to `sequence`, or changes nothing and returns False.

        Args:
          running: sequences that hold a slot.
          victim: one of them that is to give up its slot to `sequence`.
          found: by group, cached or owned pages that `sequence` will hold: they need not be promised, and those
            without an owner stop being available. None: none, in no group.
        """
        lacking = self._lacking(sequence, found)
        if self.num_promised + sum(lacking) > self._num_left(sequence, found, running, victim):
            return False
        self._promise_each(sequence, lacking)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Promises a page in every group in which none is promised, or changes nothing and returns False."""
        lacking = [int(not holding.num_promised) for holding in sequence.holdings]
        if self.num_promised + sum(lacking) > self._pages.num_promisable:
            return False
        self._promise_each(sequence, lacking)
        return True

    def passed(self, sequence: Sequence, holding: Holding, count: int) -> None:
        """`sequence` has given `count` pages back: as many are promised, up to what it will hold at once."""
        tokens, start = sequence.max_total_tokens, sequence.num_scheduled
        most = self._most_pages(sequence, holding.window, tokens, holding.num_passed, start)
        promised = min(holding.num_promised + count, max(most - len(holding.pages), 0))
        self._promise(holding, promised - holding.num_promised)

    def steps_within(self, sequences: Items[Sequence], most: int) -> int:
        """How many decode steps of all `sequences`, up to `most`, find their pages; each finds those of one.

        Nobody is preempted for them, and no promise to others suffers. O(sequences log most) where pages can run out,
        or the steps at once span more than a step and its window, else O(1).
        """
        left = self._pages.num_promisable - self.num_promised
        if left < 0:  # only the worst moment of single steps is known to fit
            return 1
        if not self.grows and not any(self._config.windows):
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            lacking = sum([self._unpromised(sequence, middle) for sequence in sequences])
            low, high = (middle, high) if lacking <= left else (low, middle - 1)
        return low

    def cover(self, sequence: Sequence, num_steps: int) -> None:
        """Promises what `num_steps` decode steps need beyond what is promised; `steps_within` has found it."""
        needed = self._needed(sequence, num_steps)
        for holding in sequence.holdings:
            if needed > holding.num_promised:
                self._promise(holding, needed - holding.num_promised)

    def _unpromised(self, sequence: Sequence, num_steps: int) -> int:
        """Pages that so many decode steps need and nobody promised, in all groups together."""
        needed = self._needed(sequence, num_steps)
        return sum([max(needed - holding.num_promised, 0) for holding in sequence.holdings])

    def _needed(self, sequence: Sequence, num_steps: int) -> int:
        """Pages of each group that so many decode steps need, at most as many as the sequence has left."""
        return self._pages_of(min(sequence.num_scheduled + num_steps, sequence.num_kv_tokens)) - sequence.num_pages

    def take(self, sequence: Sequence, holding: Holding, count: int) -> None:
        """`count` promised pages of a group are in the sequence's hands."""
        assert count <= holding.num_promised, f"{sequence.request_id} takes pages that were not promised"
        holding.num_promised -= count
        self.num_promised -= count

    def take_one_each(self, holdings: Items[Holding]) -> None:
        """`take` of one page each."""
        for holding in holdings:
            assert holding.num_promised, f"a page of group {holding.group} is taken that was not promised"
            holding.num_promised -= 1
        self.num_promised -= len(holdings)

    def release(self, sequence: Sequence) -> None:
        """Takes every promise back."""
        for holding in sequence.holdings:
            self._promise(holding, -holding.num_promised)

    def _num_left(
        self,
        sequence: Sequence,
        found: Items[Found] | None,
        running: Collection[Sequence],
        victim: Sequence | None,
    ) -> int:
        """Promisable pages once `sequence` owns what is found, less those that are left for others on purpose."""
        left = self._pages.num_promisable
        if found is not None:
            for holding, (_, shared) in zip(sequence.holdings, found, strict=True):
                left -= self._pages.cost_of_sharing(shared, passing=holding.gives_back)
        return left

    def _lacking(self, sequence: Sequence, found: Items[Found] | None) -> list[int]:
        """Pages to promise in each group beyond those held, promised and shared."""
        if sequence.num_setbacks >= self._config.max_preemptions:
            tokens = sequence.max_total_tokens
        else:
            tokens = self._tokens(sequence)
        lacking = []
        for index, holding in enumerate(sequence.holdings):
            first, shared = (holding.num_passed, ()) if found is None else found[index]
            start = sequence.num_scheduled or (first + len(shared)) * self._page_size
            most = self._most_pages(sequence, holding.window, tokens, first, start)
            lacking.append(max(most - len(holding.pages) - holding.num_promised - len(shared), 0))
        return lacking

    def _most_pages(self, sequence: Sequence, window: int, num_tokens: int, first: int, start: int) -> int:
        """Pages of a group that it holds at once on its way to `num_tokens`.

        Args:
          window: of the group.
          first: page from which on it holds pages.
          start: token at which it is now.
        """
        pages = self._pages_of(num_tokens) - first
        if not window:
            return pages
        most = min(pages, self._spanned_by_token[window])
        end = sequence.num_known_tokens if sequence.restarted else sequence.num_prefill_tokens
        if start < end:
            spanned = self._config.pages_spanned(min(end - start, self._chunk), window)
            most = max(most, min(self._pages_of(end) - first, spanned))
        return most

    def _tokens(self, sequence: Sequence) -> int:
        """Tokens whose pages are promised."""
        return sequence.max_total_tokens

    def _promise_each(self, sequence: Sequence, counts: Items[int]) -> None:
        """`_promise` in every group."""
        for holding, count in zip(sequence.holdings, counts, strict=True):
            self._promise(holding, count)

    def _promise(self, holding: Holding, count: int) -> None:
        holding.num_promised += count
        self.num_promised += count

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


class Expected(Reservation):
    """Promises prompt and the `expected_quantile` of the outputs observed so far."""

    grows = True

    def _tokens(self, sequence: Sequence) -> int:
        so_far = len(sequence.output_token_ids)
        expected = self._lengths.expected(self._config.expected_quantile, so_far, sequence.request.max_tokens)
        return min(sequence.num_prompt_tokens + max(expected, so_far + 1), sequence.max_total_tokens)


class Optimistic(Reservation):
    """Promises the tokens known and one more; a page per running sequence and group is left for their next tokens."""

    grows = True

    def _tokens(self, sequence: Sequence) -> int:
        return min(sequence.num_prompt_tokens + len(sequence.output_token_ids) + 1, sequence.max_total_tokens)

    def _num_left(
        self,
        sequence: Sequence,
        found: Items[Found] | None,
        running: Collection[Sequence],
        victim: Sequence | None,
    ) -> int:
        num_others = len(running) - (victim is not None)
        return super()._num_left(sequence, found, running, victim) - num_others * self._num_groups


class Exact(Reservation):
    """Admits while the worst moment of the running set, over all steps to come, fits.

    Decode-ready sequences with a slot gain a token each in every iteration, so when each of them ends,
    at the latest, is known, and with it how many pages they need together at any step: less than the sum
    of their maxima, since not all are longest at once. All others, which may stand still for any time,
    count with their maxima. Every promise is the maximum, as under `guaranteed`; it is the sum of the
    promises that may exceed what is available.
    """

    def reserve(
        self,
        sequence: Sequence,
        running: Collection[Sequence],
        *,
        victim: Sequence | None = None,
        found: Items[Found] | None = None,
    ) -> bool:
        """See `Reservation.reserve`. O(running log running), O(1) while the promises of all fit."""
        lacking = self._lacking(sequence, found)
        left = self._num_left(sequence, found, running, victim) - sum(lacking)
        # No moment needs more than all promises together, and what the steps ahead may add to each sequence.
        ahead = self._pages_of(self._config.max_steps_ahead) * self._num_groups
        if self.num_promised + len(running) * ahead <= left:
            self._promise_each(sequence, lacking)
            return True
        # `decode_ready`, compared in place: a call per running sequence would show.
        in_step = [s for s in running if s.num_scheduled >= s.num_prefill_tokens and s is not victim]
        left -= self.num_promised
        for group in range(self._num_groups):
            left += sum([other.holdings[group].num_promised for other in in_step])
        shared = frozenset([page for _, pages in found or () for page in pages])
        if left < 0 or peak_of_additional_pages(in_step, shared, self._pages, self._config) > left:
            return False
        self._promise_each(sequence, lacking)
        return True


RESERVATIONS: dict[str, Callable[[SchedulerConfig, PageAllocator, LengthEstimator], Reservation]] = {
    "guaranteed": Reservation,
    "exact": Exact,
    "expected": Expected,
    "optimistic": Optimistic,
}
