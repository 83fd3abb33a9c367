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

Where every layer has a sliding window, a sequence gives pages back while it runs. What is promised is then what it
holds at once: while it computes its prompt the pages that a chunk and the window before it span, and what a
token and its window span once it decodes. Each page it gives back raises what is available, and its promise by as
much, as long as it will hold so many again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler.length_estimator import LengthEstimator
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.peak import peak_of_additional_pages
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
        self._pages = pages
        self._lengths = lengths
        self.num_promised = 0

    def pages_needed(self, request: Request) -> int:
        """Pages that must exist in the whole pool for `request` ever to run, outputs computed again as prompts too."""
        pages = self._pages_of(request.num_prompt_tokens + request.max_tokens)
        return min(pages, self._config.pages_spanned(self._chunk)) if self._config.sliding_window else pages

    def reserve(
        self,
        sequence: Sequence,
        running: Collection[Sequence],
        *,
        victim: Sequence | None = None,
        shared: Items[int] = (),
        first: int = 0,
    ) -> bool:
        """Promises pages to `sequence`, or changes nothing and returns False.

        Args:
          running: sequences that hold a slot.
          victim: one of them that is to give up its slot to `sequence`.
          shared: cached or owned pages that `sequence` will hold: they need not be promised, and those
            without an owner stop being available.
          first: page from which on it holds or shares pages: no layer sees those before it any more.
        """
        lacking = self._lacking(sequence, shared, first)
        if self.num_promised + lacking > self._num_left(sequence, shared, running, victim):
            return False
        self._promise(sequence, lacking)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Promises one page more, or changes nothing and returns False."""
        if self.num_promised >= self._pages.num_promisable:
            return False
        self._promise(sequence, 1)
        return True

    def passed(self, sequence: Sequence, count: int) -> None:
        """`sequence` has given `count` pages back: as many are promised, up to what it will hold at once."""
        most = self._most_pages(sequence, sequence.max_total_tokens, sequence.num_passed_pages, sequence.num_scheduled)
        promised = min(sequence.num_promised_pages + count, max(most - len(sequence.pages), 0))
        self._promise(sequence, promised - sequence.num_promised_pages)

    def steps_within(self, sequences: Items[Sequence], most: int) -> int:
        """How many decode steps of all `sequences`, up to `most`, find their pages; each finds those of one.

        Nobody is preempted for them, and no promise to others suffers. O(sequences log most) where pages can run out,
        or the steps at once span more than a step and its window, else O(1).
        """
        left = self._pages.num_promisable - self.num_promised
        if left < 0:  # only the worst moment of single steps is known to fit
            return 1
        if not self.grows and not self._config.sliding_window:
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            lacking = sum([self._unpromised(sequence, middle) for sequence in sequences])
            low, high = (middle, high) if lacking <= left else (low, middle - 1)
        return low

    def cover(self, sequence: Sequence, num_steps: int) -> None:
        """Promises what `num_steps` decode steps need beyond what is promised; `steps_within` has found it."""
        self._promise(sequence, self._unpromised(sequence, num_steps))

    def _unpromised(self, sequence: Sequence, num_steps: int) -> int:
        """Pages that so many decode steps need, at most as many as the sequence has left, and nobody promised."""
        end = min(sequence.num_scheduled + num_steps, sequence.num_kv_tokens)
        return max(self._pages_of(end) - sequence.num_pages - sequence.num_promised_pages, 0)

    def take(self, sequence: Sequence, count: int) -> None:
        """`count` promised pages are in the sequence's hands."""
        assert count <= sequence.num_promised_pages, f"{sequence.request_id} takes pages that were not promised"
        sequence.num_promised_pages -= count
        self.num_promised -= count

    def take_one_each(self, sequences: Items[Sequence]) -> None:
        """`take` of one page for several sequences."""
        for sequence in sequences:
            assert sequence.num_promised_pages, f"{sequence.request_id} takes a page that was not promised"
            sequence.num_promised_pages -= 1
        self.num_promised -= len(sequences)

    def release(self, sequence: Sequence) -> None:
        """Takes every promise back."""
        self._promise(sequence, -sequence.num_promised_pages)

    def _num_left(
        self, sequence: Sequence, shared: Items[int], running: Collection[Sequence], victim: Sequence | None
    ) -> int:
        """Promisable pages once `sequence` owns `shared`, less those that are left for others on purpose."""
        cost = self._pages.cost_of_sharing(shared, passing=sequence.gives_pages_back)
        return self._pages.num_promisable - cost

    def _lacking(self, sequence: Sequence, shared: Items[int], first: int) -> int:
        """Pages to promise beyond those held, promised and shared."""
        if sequence.num_setbacks >= self._config.max_preemptions:
            tokens = sequence.max_total_tokens
        else:
            tokens = self._tokens(sequence)
        start = sequence.num_scheduled or (first + len(shared)) * self._page_size
        most = self._most_pages(sequence, tokens, first, start)
        return max(most - len(sequence.pages) - sequence.num_promised_pages - len(shared), 0)

    def _most_pages(self, sequence: Sequence, num_tokens: int, first: int, start: int) -> int:
        """Pages it holds at once on its way to `num_tokens`, now at token `start` and with pages from `first` on."""
        pages = self._pages_of(num_tokens) - first
        if not self._config.sliding_window:
            return pages
        most = min(pages, self._config.pages_spanned(1))
        end = sequence.num_known_tokens if sequence.restarted else sequence.num_prefill_tokens
        if start < end:
            spanned = self._config.pages_spanned(min(end - start, self._chunk))
            most = max(most, min(self._pages_of(end) - first, spanned))
        return most

    def _tokens(self, sequence: Sequence) -> int:
        """Tokens whose pages are promised."""
        return sequence.max_total_tokens

    def _promise(self, sequence: Sequence, count: int) -> None:
        sequence.num_promised_pages += count
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
    """Promises the tokens known and one more; a page per running sequence is left for their next tokens."""

    grows = True

    def _tokens(self, sequence: Sequence) -> int:
        return min(sequence.num_prompt_tokens + len(sequence.output_token_ids) + 1, sequence.max_total_tokens)

    def _num_left(
        self, sequence: Sequence, shared: Items[int], running: Collection[Sequence], victim: Sequence | None
    ) -> int:
        return super()._num_left(sequence, shared, running, victim) - (len(running) - (victim is not None))


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
        shared: Items[int] = (),
        first: int = 0,
    ) -> bool:
        """See `Reservation.reserve`. O(running log running), O(1) while the promises of all fit."""
        lacking = self._lacking(sequence, shared, first)
        left = self._num_left(sequence, shared, running, victim) - lacking
        # No moment needs more than all promises together, and what the steps ahead may add to each sequence.
        if self.num_promised + len(running) * self._pages_of(self._config.max_steps_ahead) <= left:
            self._promise(sequence, lacking)
            return True
        # `decode_ready`, compared in place: a call per running sequence would show.
        in_step = [s for s in running if s.num_scheduled >= s.num_prefill_tokens and s is not victim]
        left -= self.num_promised - sum([other.num_promised_pages for other in in_step])
        if left < 0 or peak_of_additional_pages(in_step, frozenset(shared), self._pages, self._config) > left:
            return False
        self._promise(sequence, lacking)
        return True


RESERVATIONS: dict[str, Callable[[SchedulerConfig, PageAllocator, LengthEstimator], Reservation]] = {
    "guaranteed": Reservation,
    "exact": Exact,
    "expected": Expected,
    "optimistic": Optimistic,
}
