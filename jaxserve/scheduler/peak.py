"""The most pages that sequences growing in step will need together."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from collections.abc import Sequence as Items
from operator import add

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

    Groups of layers need their pages at the same moments: what each needs is added up.

    Args:
      sequences: decode-ready, each with a slot.
      shared: pages that get one more owner, who outlasts them all.
      pages: tells which of their pages nobody else holds: those return.
      config: page size and window; `max_steps_ahead` plans pass between a sequence's last row and its pages' return.

    Returns:
      At least 0: more than they hold now.
    """
    windows = config.windows
    peaks: list[int] = []
    for window in dict.fromkeys(windows):
        groups = [group for group, each in enumerate(windows) if each == window]
        needed = _additional_pages(sequences, shared, pages, config, window, groups)
        peaks = list(map(add, peaks, needed)) if peaks else needed
    return max(peaks, default=0)


def _additional_pages(
    sequences: Items[Sequence],
    shared: Collection[int],
    pages: PageAllocator,
    config: SchedulerConfig,
    window: int,
    groups: Items[int],
) -> list[int]:
    """By moment, from the last to the first, the additional pages of the groups of one window; 0 first, for none.

    If all groups have this window, the peak alone: moments that cannot be it are not counted to the end.
    """
    size, ahead = config.page_size, config.max_steps_ahead
    num_groups, counts_all = len(groups), len(groups) < len(config.windows)
    most = config.pages_spanned(1, window)
    # Tokens up to which a sequence grows; without a window none reaches it.
    limit = most * size - size if window else config.max_model_len + ahead
    rows = []
    num_private = 0
    for sequence in sequences:
        holdings = sequence.holdings
        own = holdings[groups[0]].pages
        if num_groups > 1:
            own = [page for group in groups for page in holdings[group].pages]
        private = pages.num_private(own, shared)
        num_private += private
        scheduled = sequence.num_scheduled
        rows.append((sequence.num_kv_tokens - scheduled, scheduled, len(own) - private))
    rows.sort(reverse=True)
    num_by_remainder = [0] * size
    # Of all groups the pages that others share and those that have been returned; of one the full pages of those that
    # are there.
    lent, balance = -num_private, 0
    found, peak, count = [0], 0, 0
    grown: list[int] = []  # tokens of those that do not grow any more at that moment, a heap
    for remaining, scheduled, num_shared in rows:
        moment = remaining + ahead
        lent -= num_shared
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
        of_one = balance + count * whole + count + len(grown) * most
        if not rest:
            of_one -= num_by_remainder[0]
        # At most all of them overflow; most moments are out of the question without counting how many do.
        elif counts_all or lent + num_groups * (of_one + count) > peak:
            of_one += sum(num_by_remainder[size - rest + 1 :])
        additional = lent + num_groups * of_one
        if counts_all:
            found.append(additional)
        elif additional > peak:
            peak = additional
    return found if counts_all else [peak]
