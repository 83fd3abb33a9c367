"""The most pages that sequences growing in step will need together."""

from __future__ import annotations

import heapq
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

    With a sliding window a sequence grows up to what a token and its window span, and no further. From the last
    moment to the first ever more of those that have come so far have not yet: each is counted as grown until then.

    Args:
      sequences: decode-ready, each with a slot.
      shared: pages that get one more owner, who outlasts them all.
      pages: tells which of their pages nobody else holds: those return.
      config: page size and window; `max_steps_ahead` plans pass between a sequence's last row and its pages' return.

    Returns:
      At least 0: more than they hold now.
    """
    size, ahead = config.page_size, config.max_steps_ahead
    most = config.pages_spanned(1)
    # Tokens up to which a sequence grows; without a window none reaches it.
    limit = most * size - size if config.sliding_window else config.max_model_len + ahead
    rows = []
    num_private = 0
    for sequence in sequences:
        private = pages.num_private(sequence.pages, shared)
        num_private += private
        scheduled = sequence.num_scheduled
        rows.append((sequence.num_kv_tokens - scheduled, scheduled, len(sequence.pages) - private))
    rows.sort(reverse=True)
    num_by_remainder = [0] * size
    # Full pages of those that are there, less pages that they hold and that others have returned.
    balance = -num_private
    peak = count = 0
    grown: list[int] = []  # tokens of those that do not grow any more at that moment, a heap
    for remaining, scheduled, num_shared in rows:
        moment = remaining + ahead
        balance -= num_shared
        if scheduled + moment > limit:
            heapq.heappush(grown, scheduled)
        else:
            balance += scheduled // size
            num_by_remainder[scheduled % size] += 1
            count += 1
        while grown and grown[0] + moment <= limit:
            tokens = heapq.heappop(grown)
            balance += tokens // size
            num_by_remainder[tokens % size] += 1
            count += 1
        whole, rest = divmod(moment, size)
        # Each of them ends in a page begun, unless it is exactly full, and in one more if the rest overflows it.
        additional = balance + count * whole + count + len(grown) * most
        if not rest:
            additional -= num_by_remainder[0]
        # At most all of them overflow; most moments are out of the question without counting how many do.
        elif additional + count > peak:
            additional += sum(num_by_remainder[size - rest + 1 :])
        if additional > peak:
            peak = additional
    return peak
