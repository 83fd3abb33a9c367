"""The most pages that sequences growing in step will need together."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.sequence import Sequence


def peak_of_additional_pages(
    sequences: Items[Sequence], shared: Collection[int], pages: PageAllocator, config: SchedulerConfig
) -> int:
    """Pages that must be available now so that every sequence can gain a token in each plan until it ends.

    A sequence needs most right before another one returns its pages, so only those moments are looked
    at, from the last to the first: at each, those that last longer are still there and have grown, the
    others are gone. Pages come whole, so how many tokens each has in its last page matters; counting the
    sequences by that remainder makes each moment cost O(page size).

    Args:
      sequences: decode-ready, each with a slot.
      shared: pages that get one more owner, who outlasts them all.
      pages: tells which of their pages nobody else holds: those return.
      config: page size; `max_steps_ahead` plans pass between a sequence's last row and its pages' return.

    Returns:
      May be negative: fewer than they hold now.
    """
    size = config.page_size
    by_end = sorted(sequences, key=lambda s: s.num_kv_tokens - s.num_scheduled, reverse=True)
    private = [pages.num_private(sequence.pages, shared) for sequence in by_end]
    returned = sum(private)
    num_by_remainder = [0] * size
    num_full = num_held = peak = 0
    for count, sequence in enumerate(by_end, 1):
        full, remainder = divmod(sequence.num_scheduled, size)
        num_full += full
        num_by_remainder[remainder] += 1
        num_held += len(sequence.pages)
        returned -= private[count - 1]
        grown = sequence.num_kv_tokens - sequence.num_scheduled + config.max_steps_ahead
        whole, rest = divmod(grown, size)
        # Each of them ends in a page begun, unless it is exactly full, and in one more if the rest overflows it.
        begun = count - (num_by_remainder[0] if rest == 0 else 0)
        additional = num_full + count * whole + begun - num_held - returned
        # At most all of them overflow; most moments are out of the question without counting how many do.
        if rest and additional + count > peak:
            additional += sum(num_by_remainder[size - rest + 1 :])
        if additional > peak:
            peak = additional
    return peak
