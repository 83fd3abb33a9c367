"""Layers in groups with pages of their own: a page is of one group, and those of a window are given back.

Pages of 4 tokens. Group 0 sees all tokens, the others have windows: under one of 6 a decoding request holds 3 pages.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.holding import Holding
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.peak import peak_of_additional_pages
from jaxserve.scheduler.plan import PageUpdate
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.replayer import replay
from tests.scheduler.harness import Harness, make_config, make_request

GROUPS = (0, 6, 6)


def grouped(*, windows: tuple[int, ...] = GROUPS, **changes: Any) -> SchedulerConfig:
    return make_config(group_windows=windows, **changes)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_pages_of_a_decoding_request_by_hand(lag: int) -> None:
    harness = Harness(grouped(windows=(0, 6)), lag)
    harness.add(make_request("a", 8, 20))
    held = []
    for _ in range(20):
        harness.plan()
        held.append(harness.scheduler.pages_owned)
    # In the group that sees all one more every fourth token; in the other two or three, as if it were alone.
    full = [2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7]
    other = [2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2]
    assert held == [a + b for a, b in zip(full, other, strict=True)]
    assert harness.plans[0].pages == (PageUpdate(0, 0, (1, 2), 0), PageUpdate(0, 0, (3, 4), 1))
    assert harness.plans[1].pages == (PageUpdate(0, 2, (5,), 0), PageUpdate(0, 2, (6,), 1))
    assert harness.plans[2].pages == (PageUpdate(0, 0, (0,), 1),)
    # The page that the window left behind is the lowest free one: of the other group now.
    assert harness.plans[5].pages == (PageUpdate(0, 3, (3,), 0), PageUpdate(0, 3, (7,), 1))
    harness.run()
    assert harness.ends == {"a": "length"} and harness.scheduler.pages_free == 256


def test_two_groups_of_one_window_are_as_one_of_twice_the_layers() -> None:
    def plans(config: SchedulerConfig) -> list[Any]:
        harness = Harness(config)
        harness.add(*(make_request(f"r{index}", 3 + 5 * index, 12) for index in range(6)))
        harness.run()
        return [(plan.decode, plan.prefill, plan.placements, plan.preempted) for plan in harness.plans]

    for reservation in ("guaranteed", "exact", "expected", "optimistic"):
        policy = {"reservation": reservation, "preemption": "recompute"}
        one = plans(make_config(sliding_window=6, num_pages=11, **policy))
        assert plans(grouped(windows=(6, 6), num_pages=21, **policy)) == one


def test_a_request_that_never_fits_counts_all_groups() -> None:
    """64 tokens are 16 pages of the first group; a chunk of 8 and its window lie in 4 pages of each of the others."""
    harness = Harness(grouped(num_pages=1 + 16 + 4 + 4))
    harness.add(make_request("long", 30, 34))
    harness.run()
    assert len(harness.outputs["long"]) == 34
    (refusal,) = Harness(grouped(num_pages=24)).add(make_request("long", 30, 34))
    assert refusal is not None and "64 tokens and need 24 KV pages of 4; the pool has 23" in refusal.message


@pytest.mark.parametrize("reservation", ["guaranteed", "exact", "expected"])
def test_what_is_promised_falls_when_the_prompt_is_computed(reservation: str) -> None:
    harness = Harness(grouped(reservation=reservation, preemption="recompute"))
    harness.add(make_request("a", 32, 20))
    sequence = harness.scheduler.sequence("a")
    counts = []
    for _ in range(6):
        harness.plan()
        counts.append([len(holding.pages) + holding.num_promised for holding in sequence.holdings])
    assert counts == [[13, 4, 4]] * 4 + [[13, 3, 3]] * 2


def test_a_growing_reservation_promises_a_page_of_every_group() -> None:
    harness = Harness(grouped(reservation="optimistic", preemption="recompute"))
    harness.add(make_request("a", 8, 20))
    sequence = harness.scheduler.sequence("a")
    for _ in range(20):
        promised = [holding.num_promised for holding in sequence.holdings]
        plan = harness.plan()
        taken = [update for update in plan.pages if update.page_ids != (0,)]
        assert len(taken) in (0, 3), f"pages for {len(taken)} groups, promised were {promised}"


def test_a_mixed_model_holds_fewer_bytes() -> None:
    """Of 6 layers 4 have a window: one group of all holds 256 bytes per token page, three groups of 2 a third of it."""
    tokens, page_bytes = 64, 256

    def most_bytes(config: SchedulerConfig, num_groups: int) -> int:
        harness = Harness(config)
        harness.add(make_request("a", 24, tokens - 24))
        most = 0
        while not harness.scheduler.idle:
            harness.step()
            most = max(most, harness.scheduler.pages_owned)
        return most * page_bytes // num_groups

    # 63 tokens are written: 16 pages in one group, and 16 + 3 + 3 of a third of the size.
    assert most_bytes(make_config(), 1) == 16 * 256
    assert most_bytes(grouped(), 3) == (16 + 3 + 3) * 256 // 3


def test_a_pool_holds_more_requests() -> None:
    """Of 28 tokens: 7 pages of all layers; or 7, 3 and 3 of a third of them."""

    def running(config: SchedulerConfig) -> int:
        harness = Harness(config)
        harness.add(*(make_request(f"r{index}", 4, 24) for index in range(4)))
        found = harness.scheduler.num_running
        harness.run()
        return found

    assert (running(make_config(num_pages=1 + 14)), running(grouped(num_pages=1 + 42))) == (2, 3)


def test_a_beginning_needs_all_pages_of_one_group_and_the_last_of_the_others() -> None:
    cache = PrefixCache()
    names = [bytes([index]) * 16 for index in range(6)]
    for index in range(5):
        cache.enter(names[index], 10 + index)
    for index in (1, 2, 3, 5):
        cache.enter(names[index], 20 + index, 1)
    for index in (0, 1, 2, 3, 4):
        cache.enter(names[index], 30 + index, 2)
    assert cache.find_beginning(names, [None]) == [(0, [10, 11, 12, 13, 14])]
    assert cache.find_beginning(names, [None, 2]) == [(0, [10, 11, 12, 13]), (2, [22, 23])]
    assert cache.find_beginning(names, [None, 2, 1]) == [(0, [10, 11, 12, 13]), (2, [22, 23]), (3, [33])]
    assert cache.find_beginning(names, [None, 4, 1]) == [(0, []), (0, []), (0, [])], "page 0 of group 1 is missing"
    assert cache.find_beginning(names[1:], [1, 3, None]) == [(2, [13]), (0, [21, 22, 23]), (0, [31, 32, 33])]
    assert cache.find_beginning(names, [2, 3, 2]) == [(2, [12, 13]), (1, [21, 22, 23]), (2, [32, 33])]
    assert sorted(set(cache.names)) == names


def test_what_windows_left_behind_is_evicted_first_and_not_missed() -> None:
    harness = Harness(grouped(num_pages=24, enable_prefix_caching=True))
    harness.add(make_request("a", 33, 2))
    harness.run()
    scheduler = harness.scheduler
    # Of 23 pages three held the last token, so of 24 full ones 20 are there.
    assert (scheduler.pages_cached, scheduler.pages_free) == (20, 3)
    harness.add(make_request("b", 33, 2))
    sequence = scheduler.sequence("b")
    assert sequence.num_cached_tokens == 32
    assert [(holding.num_passed, len(holding.pages)) for holding in sequence.holdings] == [(0, 8), (6, 2), (6, 2)]
    plan = harness.step()
    assert [update.page_ids[:6] == (0,) * 6 for update in plan.pages[:3]] == [False, True, True]
    harness.run()
    assert harness.outputs["a"] == harness.outputs["b"]


def test_a_beginning_without_a_windows_pages_is_computed_again() -> None:
    harness = Harness(grouped(num_pages=257, enable_prefix_caching=True))
    harness.add(make_request("a", 33, 2))
    harness.run()
    pages = harness.scheduler._pages
    page = pages.cache.find_beginning(harness_names(harness), [None, None, 2])[2].pages[-1]
    pages.cache._idle.move_to_end(page, last=False)
    assert pages.cache.evict() == page
    pages._free.insert(0, page)
    harness.add(make_request("b", 33, 2))
    # The last page of group 2 is gone, so a beginning of 7 pages is the longest.
    assert harness.scheduler.sequence("b").num_cached_tokens == 28
    harness.run()


def harness_names(harness: Harness) -> list[bytes]:
    """Names in the cache, in the order in which they were entered."""
    return list(dict.fromkeys(harness.scheduler._pages.cache.names))


@pytest.mark.parametrize("cache", [False, True])
def test_a_swap_copies_the_held_pages_of_every_group(cache: bool) -> None:
    config = grouped(
        num_pages=27,
        reservation="optimistic",
        preemption="swap",
        num_host_pages=40,
        enable_prefix_caching=cache,
        max_num_seqs=2,
    )
    harness = Harness(config, 1)
    harness.add(make_request("a", 8, 40), make_request("b", 9, 40, tenant="b"))
    counts = []
    while not harness.scheduler.idle:
        plan = harness.step()
        for swap in plan.swaps:
            assert len(set(swap.page_ids)) == len(swap.page_ids) == len(set(swap.host_page_ids))
            if swap.out and swap.request_id in harness.scheduler.waiting_ids:
                holdings = harness.scheduler.sequence(swap.request_id).holdings
                counts.append([len(holding.host_pages) for holding in holdings])
                assert sum(counts[-1]) == len(swap.page_ids)
    # All of its pages in the first group, two or three in the others.
    assert counts and all(first > 3 and {*others} <= {2, 3} for first, *others in counts), counts
    assert len(harness.outputs["a"]) == len(harness.outputs["b"]) == 40
    assert harness.scheduler.host_pages_free == 40


@pytest.mark.parametrize("seed", range(20))
def test_peak_is_what_stepping_through_finds(seed: int) -> None:
    rng = random.Random(seed)
    size, windows = rng.choice([1, 2, 4]), rng.choice([(0, 3), (0, 7, 7), (2, 9), (0, 0, 5), (12, 4, 4)])
    config, pages = make_config(page_size=size, group_windows=windows), PageAllocator(900)
    most = [config.pages_spanned(1, window) if window else 10**6 for window in windows]
    sequences = []
    for index in range(rng.randint(1, 9)):
        scheduled, left = rng.randint(1, 30), rng.randint(1, 25)
        sequence = Sequence(make_request(f"r{index}", scheduled, left + 1), index, 0.0, num_scheduled=scheduled)
        sequence.holdings = [Holding(group, window) for group, window in enumerate(windows)]
        for holding, limit in zip(sequence.holdings, most, strict=True):
            holding.pages = pages.allocate(min(-(-scheduled // size), limit))
        sequences.append(sequence)
    held = sum(sequence.num_held_pages for sequence in sequences)
    peak = 0
    for step in range(1, 26):
        alive = [s for s in sequences if s.num_scheduled + step <= s.num_kv_tokens]
        needed = sum(min(-(-(s.num_scheduled + step) // size), limit) for s in alive for limit in most)
        peak = max(peak, needed - held)
    assert peak_of_additional_pages(sequences, frozenset(), pages, config) == peak


@pytest.mark.parametrize("cache", [False, True])
def test_a_trace_of_groups_replays_to_the_byte(tmp_path: Any, cache: bool) -> None:
    config = grouped(
        num_pages=31,
        reservation="optimistic",
        preemption="auto",
        num_host_pages=20,
        enable_prefix_caching=cache,
        max_queue_requests=99,
    )
    harness = Harness(config, 1)
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, config=harness.config)
    rng = random.Random(5)
    for index in range(30):
        harness.add(make_request(f"r{index}", rng.randint(1, 20), rng.randint(8, 40)))
        harness.step()
    harness.run()
    harness.scheduler.flush_trace()
    for record in harness.records:
        writer(record)
    writer.close()
    assert harness.scheduler.counters.preemptions > 0, "nothing was preempted: the test shows nothing"
    reader = TraceReader(path)
    assert reader.header.config == harness.config and reader.header.config.group_windows == GROUPS
    replayed: list[dict[str, Any]] = []
    assert replay(reader, sink=replayed.append).difference is None
    assert json.dumps(replayed) == json.dumps(harness.records)


def test_a_header_of_one_group_says_nothing_of_groups(tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    TraceWriter(path, config=make_config(sliding_window=6)).close()
    assert "group_windows" not in json.loads(path.read_text())["config"]
    assert TraceReader(path).header.config == make_config(sliding_window=6)


@pytest.mark.parametrize("windows", [(6,), (0, 6, 0), (-1, 6), tuple(range(256))])
def test_groups_that_cannot_be_are_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"group_windows is .* it must have 2 to 255 numbers of at least 0, equal ones"
    ):
        grouped(windows=windows)


def test_a_window_of_all_layers_and_groups_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"sliding_window is 5 and group_windows is \(0, 6\); set one of them"):
        make_config(sliding_window=5, group_windows=(0, 6))
    assert replace(make_config(), sliding_window=5).windows == (5,)
