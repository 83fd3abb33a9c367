"""Pages that no layer sees any more are given back while their request runs.

Pages of 4 tokens and a window of 6: a token sees the 5 before it, so a decoding request holds 3 pages at most.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.peak import peak_of_additional_pages
from jaxserve.scheduler.plan import PageUpdate
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.sequence import Sequence
from tests.scheduler.harness import Harness, make_config, make_request

WINDOW = 6


def windowed(**changes: Any) -> SchedulerConfig:
    return make_config(sliding_window=WINDOW, **changes)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_pages_of_a_decoding_request_by_hand(lag: int) -> None:
    harness = Harness(windowed(), lag)
    harness.add(make_request("a", 8, 20))
    held = []
    for _ in range(20):
        harness.plan()
        held.append(harness.scheduler.pages_owned)
    # Two for the prompt; a third at token 8. Token 9 sees 4 and those after it, so page 0 goes, and so on.
    assert held == [2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2]
    assert harness.plans[2].pages == (PageUpdate(0, 0, (0,)),)
    assert harness.plans[5].pages == (PageUpdate(0, 3, (1,)),)
    harness.run()
    assert harness.ends == {"a": "length"} and harness.scheduler.pages_free == 256


def test_pages_of_chunks_by_hand() -> None:
    harness = Harness(windowed())
    harness.add(make_request("a", 40, 1))
    held = []
    for _ in range(5):
        harness.plan()
        held.append(harness.scheduler.pages_owned)
    # The first token of the chunk [16, 24) sees 11: pages 2 to 5 are held.
    assert held == [2, 4, 4, 4, 4]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_longer_than_the_pool_runs(lag: int) -> None:
    """A chunk of 8 tokens and the 5 before it lie in 4 pages, whatever the request's length."""
    harness = Harness(windowed(num_pages=5), lag)
    harness.add(make_request("long", 30, 34))
    harness.run()
    assert len(harness.outputs["long"]) == 34
    (refusal,) = Harness(windowed(num_pages=4), lag).add(make_request("long", 30, 34))
    assert refusal is not None and "64 tokens and need 4 KV pages of 4; the pool has 3" in refusal.message


@pytest.mark.parametrize("reservation", ["guaranteed", "exact", "expected"])
def test_what_is_promised_falls_when_the_prompt_is_computed(reservation: str) -> None:
    harness = Harness(windowed(reservation=reservation, preemption="recompute"))
    harness.add(make_request("a", 32, 20))
    sequence = harness.scheduler.sequence("a")
    counts = []
    for _ in range(6):
        harness.plan()
        counts.append(sequence.num_held_pages + sequence.num_promised_pages)
    assert counts == [4, 4, 4, 4, 3, 3]


def test_a_pool_holds_more_requests() -> None:
    """Of 28 tokens each, which are 7 pages: 3 of them at once."""

    def running(window: int) -> int:
        harness = Harness(make_config(num_pages=13, sliding_window=window))
        harness.add(*(make_request(f"r{index}", 4, 24) for index in range(4)))
        found = harness.scheduler.num_running
        harness.run()
        return found

    assert (running(0), running(WINDOW)) == (1, 4)


def test_a_beginning_is_found_by_its_last_pages() -> None:
    harness = Harness(windowed(num_pages=12, enable_prefix_caching=True))
    harness.add(make_request("a", 33, 2))
    harness.run()
    cache, names = harness.scheduler._pages.cache, list(harness.scheduler._pages.cache._page_of)
    assert len(names) == 8
    for _ in range(6):  # those given back first are evicted first
        harness.scheduler._pages._free.append(cache.evict())
    harness.scheduler._pages._free.sort()
    assert [name in cache._page_of for name in names] == [False] * 6 + [True] * 2
    harness.add(make_request("b", 33, 2))
    sequence = harness.scheduler.sequence("b")
    # Token 32 sees 27 and those after it: pages 6 and 7.
    (holding,) = sequence.holdings
    assert (sequence.num_cached_tokens, holding.num_passed, len(holding.pages)) == (32, 6, 2)
    plan = harness.step()
    assert plan.pages[0].page_ids[:6] == (0,) * 6 and plan.prefill[0].start == 32
    harness.run()


def test_pages_given_back_before_their_step_has_landed_are_found() -> None:
    """With two steps in flight a chunk's pages go before its tokens came back."""
    harness = Harness(windowed(enable_prefix_caching=True), lag=2)
    harness.add(make_request("a", 32, 2))
    harness.run()
    harness.add(make_request("b", 9, 2))
    assert harness.scheduler.sequence("b").num_cached_tokens == 8


def test_pages_that_two_give_back_count_for_each() -> None:
    """Both will come to need pages of their own, and a shared page is not free when one gives it back."""
    harness = Harness(windowed(num_pages=6, enable_prefix_caching=True))
    harness.add(make_request("a", 9, 20))
    harness.step()
    harness.step()
    harness.add(make_request("b", 9, 20))
    assert harness.scheduler.waiting_ids == ["b"]
    harness.run()
    harness = Harness(windowed(num_pages=7, enable_prefix_caching=True))
    harness.add(make_request("a", 9, 20))
    harness.step()
    harness.step()
    harness.add(make_request("b", 9, 20), make_request("short", 9, 1))
    # Of five pages held, two are shared; what ends before its window is full shares them at no cost.
    assert harness.scheduler.active_ids == ["a", "b"]
    assert harness.scheduler._pages.num_extra == 2
    harness.run()


def test_owners_that_keep_their_pages_share_them_at_no_cost() -> None:
    pages = PageAllocator(10)
    (page,) = pages.allocate(1, passing=True)
    assert pages.cost_of_sharing([page]) == pages.cost_of_sharing([page], passing=True) == 1
    pages.share([page])
    assert (pages.num_extra, pages.cost_of_sharing([page]), pages.cost_of_sharing([page], passing=True)) == (1, 0, 1)
    pages.share([page])
    pages.release([page], passing=True)
    assert (pages.num_extra, pages.num_promisable) == (0, 8)
    pages.release([page])
    pages.release([page])
    assert (pages.num_extra, pages.num_promisable) == (0, 9)


def test_the_longest_beginning_whose_last_pages_are_there() -> None:
    cache = PrefixCache()
    names = [bytes([index]) for index in range(8)]
    for index in (0, 2, 3, 5, 7):
        cache.enter(names[index], 10 + index)
    assert cache.find_beginning(names, [1]) == [(7, [17])]
    assert cache.find_beginning(names, [2]) == [(2, [12, 13])]
    assert cache.find_beginning(names, [3]) == [(0, [10])], "one shorter than the window needs all of its pages"
    assert cache.find_beginning(names, [0]) == [(8, [])]
    assert cache.find_beginning(names[1:2], [1]) == [(0, [])]


@pytest.mark.parametrize("seed", range(20))
def test_peak_is_what_stepping_through_finds(seed: int) -> None:
    rng = random.Random(seed)
    size, window = rng.choice([1, 2, 4]), rng.randint(1, 12)
    config, pages = make_config(page_size=size, sliding_window=window), PageAllocator(400)
    most = config.pages_spanned(1, window)
    sequences = []
    for index in range(rng.randint(1, 9)):
        scheduled, left = rng.randint(1, 30), rng.randint(1, 25)
        sequence = Sequence(make_request(f"r{index}", scheduled, left + 1), index, 0.0, num_scheduled=scheduled)
        sequence.holdings[0].pages = pages.allocate(min(-(-scheduled // size), most))
        sequences.append(sequence)
    held = sum(sequence.num_held_pages for sequence in sequences)
    peak = 0
    for step in range(1, 26):
        alive = [s for s in sequences if s.num_scheduled + step <= s.num_kv_tokens]
        peak = max(peak, sum(min(-(-(s.num_scheduled + step) // size), most) for s in alive) - held)
    assert peak_of_additional_pages(sequences, frozenset(), pages, config) == peak


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 7, 8, 9, 17])
def test_pages_spanned_are_those_counted(size: int, window: int) -> None:
    config = make_config(page_size=size, sliding_window=window)
    for count in (1, 2, 3, 5, 8):
        spans = [(first + count - 1) // size - max(first - window + 1, 0) // size + 1 for first in range(100)]
        assert config.pages_spanned(count, window) == max(spans)
