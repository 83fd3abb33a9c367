"""Many short lives of a scheduler under every combination of policies: nobody is stuck, nothing leaks.

A run draws limits and policies from its seed, feeds arrivals, aborts and deadlines for a while, and must
then come to an end with every output right. The harness checks plans, pages and invariants at each step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import (
    BATCHINGS,
    GROWING_RESERVATIONS,
    POLICIES,
    RESERVATIONS,
    SWAPPING_PREEMPTIONS,
    VICTIMS,
)
from jaxserve.core import Request, SamplingParams
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.replayer import replay
from tests.scheduler.harness import STOP_ID, Harness, make_config, make_request
from tests.scheduler.test_properties import CLASSES, expected_output, sample


def draw_config(rng: random.Random) -> SchedulerConfig:
    reservation = rng.choice(RESERVATIONS)
    slots = rng.randint(1, 6)
    return make_config(
        max_num_seqs=slots,
        max_num_batched_tokens=rng.randint(max(4, slots), 16),
        prefill_chunk=rng.randint(1, 9),
        max_prefill_seqs=rng.randint(1, 4),
        num_pages=rng.randint(12, 40),
        page_size=rng.choice([1, 2, 4]),
        max_queue_requests=rng.randint(0, 20),
        priority_preemption=rng.random() < 0.4,
        arrivals_claim_slots=rng.random() < 0.3,
        policy=rng.choice(POLICIES),
        reservation=reservation,
        preemption="recompute" if reservation in GROWING_RESERVATIONS else rng.choice(("pause", "recompute")),
        victim=rng.choice(VICTIMS),
        max_preemptions=rng.randint(1, 4),
        batching=rng.choice(("continuous", *BATCHINGS)),
        batch_timeout_s=rng.choice([0.5, 4.0]),
        enable_prefix_caching=rng.random() < 0.5,
        queue_displacement=rng.random() < 0.5,
        long_prefill_token_threshold=rng.choice([0, 6]),
        max_long_prefills=rng.randint(1, 2),
        itl_target_s=rng.choice([None, 0.5, 1.5]),
        service_classes=rng.choice([(), CLASSES]),
    )


def with_swaps(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """The same, but about half of them swap. Apart from `draw_config`, whose seeds are to keep their meaning."""
    rng = random.Random(f"swaps {seed}")
    if rng.random() < 0.5:
        return config
    return replace(config, preemption=rng.choice(SWAPPING_PREEMPTIONS), num_host_pages=rng.randint(1, 30))


def with_steps(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """The same, but about half of them may run several steps at once; time is the number of iterations."""
    rng = random.Random(f"steps {seed}")
    if rng.random() < 0.5:
        return config
    return replace(config, max_decode_steps=rng.randint(2, 9), max_arrival_delay_s=rng.choice([0.0, 2.5, 9.0, 1e6]))


def with_window(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """The same, of a model of which every layer has a sliding window, and with fewer pages."""
    rng = random.Random(f"window {seed}")
    config = replace(config, sliding_window=rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 20]))
    least = config.most_pages_per_seq + 1
    return replace(config, num_pages=rng.randint(least, least + config.max_num_seqs))


def with_groups(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """The same, of a model whose layers lie in two to four groups, and with fewer pages."""
    rng = random.Random(f"groups {seed}")
    kinds = rng.sample([0, 0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 20], rng.randint(1, 3))
    windows = [window for window in dict.fromkeys(kinds) for _ in range(rng.choice([1, 1, 2]))]
    config = replace(config, group_windows=tuple(windows) if len(windows) > 1 else (0, windows[0]))
    least = config.most_pages_per_seq + 1
    return replace(config, num_pages=rng.randint(least, least + 2 * config.max_num_seqs))


def draw_request(rng: random.Random, request_id: str, harness: Harness) -> Request:
    has_classes = bool(harness.config.service_classes)
    return make_request(
        request_id,
        rng.randint(1, 25),
        rng.randint(0, 20),
        priority=rng.randint(-1, 1),
        params=SamplingParams(max_tokens=None, ignore_eos=rng.random() < 0.5),
        eos_token_ids=(STOP_ID,),
        tenant=rng.choice(["", "a"]),
        service_class="bulk" if has_classes and rng.random() < 0.3 else "",
        deadline_at=harness.now + rng.uniform(0, 60) if rng.random() < 0.1 else None,
        free_running=request_id[-1] != "7",
    )


CHANGES: dict[str, Callable[[SchedulerConfig, int], SchedulerConfig]] = {
    "full": lambda config, seed: config,
    "window": with_window,
    "groups": with_groups,
}
"""What of a sequence the layers see: one group that sees all, one with a window, or several groups."""


def disturb(harness: Harness, rng: random.Random) -> None:
    """A failed step, a request held or released, or another token budget; mostly nothing."""
    scheduler, chance = harness.scheduler, rng.random()
    if chance < 0.06:
        harness.fail(keeps_pool=rng.random() < 0.5)
    elif chance < 0.10 and scheduler.num_waiting > len(scheduler.held_ids):
        waiting = [name for name in scheduler.waiting_ids if name not in scheduler.held_ids]
        assert scheduler.hold(rng.choice(waiting), harness.now)
    elif chance < 0.20 and scheduler.held_ids:
        assert scheduler.release(rng.choice(scheduler.held_ids), harness.now)
    elif chance < 0.24:
        full = harness.config.max_num_batched_tokens
        scheduler.limit_budget(rng.choice([full, full, full, rng.randint(1, full)]), harness.now)
    scheduler.check_invariants()


def settle(harness: Harness) -> None:
    """Nobody is held any more."""
    for name in harness.scheduler.held_ids:
        assert harness.scheduler.release(name, harness.now)


def live(seed: int, *, swaps: bool = True, steps: bool = True, layers: str = "full", failures: bool = False) -> Harness:
    """One run to its end, checked."""
    rng = random.Random(seed)
    config = draw_config(rng)
    config = with_swaps(config, seed) if swaps else config
    config = with_steps(config, seed) if steps else config
    harness = Harness(CHANGES[layers](config, seed), rng.randint(0, 3), sample)
    if harness.config.max_decode_steps > 1:
        harness.measure()
    admitted: dict[str, Request] = {}
    disturbances = random.Random(f"failures {seed}")
    for moment in range(60):
        if rng.random() < 0.6 and moment < 45:
            request = draw_request(rng, f"r{moment}", harness)
            if harness.add(request)[0] is None:
                admitted[request.request_id] = request
        if admitted and rng.random() < 0.03:
            harness.abort(rng.choice(list(admitted)))
        if failures:
            disturb(harness, disturbances)
        harness.step()
    settle(harness)
    harness.run()
    assert set(harness.ends) == set(admitted)
    for request_id, request in admitted.items():
        whole, output = expected_output(request), harness.outputs[request_id]
        ended = harness.ends[request_id] in ("stop", "length")
        assert output == (whole if ended else whole[: len(output)]), request_id
    scheduler = harness.scheduler
    assert scheduler.host_pages_free == harness.config.num_host_pages
    assert scheduler.pages_owned == scheduler.num_waiting == scheduler._reservation.num_promised == 0
    return harness


def lives(seeds: range, *, layers: str = "full", failures: bool = False) -> Counter[str]:
    """What happened in all of them together."""
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            harness = live(seed, layers=layers, failures=failures)
            # What `measure` made the scheduler believe is in no trace.
            if failures and harness.config.max_decode_steps == 1:
                assert_replays(harness)
                total["replays"] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counters = harness.scheduler.counters
        total["recoveries"] += counters.recoveries
        total["preemptions"] += counters.preemptions
        total["recomputed_tokens"] += counters.recomputed_tokens
        total["swapped_pages"] += counters.swapped_pages
        total["cached_tokens"] += counters.cached_tokens
        total["displaced"] += counters.rejected.get("displaced", 0)
        total["completed"] += counters.completed
        total["passed_pages"] += passed_pages(harness)
        total["of_several_steps"] += sum(plan.num_steps > 1 for plan in harness.plans)
    return total


def assert_replays(harness: Harness) -> None:
    """What was recorded is decided again."""
    harness.scheduler.flush_trace()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        writer = TraceWriter(path, config=harness.config)
        for record in harness.records:
            writer(record)
        writer.close()
        report = replay(TraceReader(path))
    assert report.difference is None, str(report.difference)


def passed_pages(harness: Harness) -> int:
    """Page table entries that became the null page."""
    return sum(update.page_ids == (0,) * len(update.page_ids) for plan in harness.plans for update in plan.pages)


NAMES = ("preemptions", "recomputed_tokens", "swapped_pages", "cached_tokens", "of_several_steps", "passed_pages")


def test_every_combination_of_policies_brings_everyone_to_an_end() -> None:
    total = lives(range(250))
    # Seeds under which the paths in question were not taken would prove nothing.
    names = ("preemptions", "recomputed_tokens", "swapped_pages", "cached_tokens", "displaced", "of_several_steps")
    assert all(total[name] > 50 for name in names), total


def test_so_it_does_where_every_layer_has_a_window() -> None:
    total = lives(range(250), layers="window")
    assert all(total[name] > 20 for name in NAMES), total


def test_so_it_does_where_layers_lie_in_groups() -> None:
    total = lives(range(200), layers="groups")
    assert all(total[name] > 30 for name in NAMES), total


@pytest.mark.parametrize("layers", CHANGES)
def test_so_it_does_where_steps_fail_requests_are_held_and_budgets_change(layers: str) -> None:
    total = lives(range(5000, 5150), layers=layers, failures=True)
    names = ("recoveries", "recomputed_tokens", "swapped_pages", "cached_tokens", "of_several_steps", "replays")
    assert all(total[name] > 20 for name in names), total


@pytest.mark.parametrize("seed", [415, 827, 10631, 11633, 12096, 12232, 20482])
def test_runs_that_once_got_stuck(seed: int) -> None:
    live(seed, swaps=False, steps=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_of_them() -> None:
    lives(range(1000, 6000))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_with_a_window() -> None:
    lives(range(1000, 6000), layers="window")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_with_groups() -> None:
    lives(range(1000, 6000), layers="groups")
