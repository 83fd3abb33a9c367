"""The figures of a trace, against runs whose figures are known by hand; a second an iteration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.core import FinishReason, Priority
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.sim.iteration_cost import IterationCost
from jaxserve.sim.spread import Spread
from jaxserve.sim.trace_summary import TraceSummary
from tests.scheduler.harness import Harness, make_config, make_request
from tests.sim.clocked import Arrival, run, summary_of
from tests.sim.recording import random_run, write_trace

SECOND = IterationCost(1.0, 0.0, 0.0)


def summary(harness: Harness, path: Path) -> TraceSummary:
    harness.scheduler.flush_trace()
    return summary_of(write_trace(path, harness.config, harness.records))


def all_at(spread: Spread | None, value: float) -> bool:
    return spread is not None and (spread.p50, spread.max) == (value, value)


def test_times_of_one_request(tmp_path: Path) -> None:
    """It waits for nothing, its prompt takes two iterations, and four tokens follow the first."""
    config = make_config()
    found = summary_of(run([Arrival(7.0, make_request("a", 12, 5))], tmp_path / "t", config, cost=SECOND))
    assert (found.offered, found.num_iterations, found.ended["completed"]) == (1, 6, 1)
    assert all_at(found.ttft_s, 2.0) and all_at(found.queue_s, 0.0) and all_at(found.prefill_s, 2.0)
    assert found.itl_s == Spread(4, 1.0, 1.0, 1.0, 1.0)
    assert all_at(found.e2e_s, 6.0) and all_at(found.output_tokens, 5) and all_at(found.stall_s, 1.0)
    assert all_at(found.decode_rows, 1) and found.prefill_tokens == Spread(2, 4, 8, 8, 8)
    assert (found.blocked_on_pages, found.not_refilled, found.ttft_tail_queue_share) == (0.0, 0.0, 0.0)


def test_a_request_that_waits_for_a_slot_has_queue_time(tmp_path: Path) -> None:
    config = make_config(max_num_seqs=1)
    arrivals = [Arrival(0.0, make_request("a", 4, 3)), Arrival(0.5, make_request("b", 4, 1))]
    found = summary_of(run(arrivals, tmp_path / "t", config, cost=SECOND))
    assert found.queue_s is not None and (found.queue_s.p50, found.queue_s.max) == (0.0, 2.5)
    assert found.ttft_s is not None and found.ttft_s.max == 3.5
    assert found.ttft_tail_queue_share == pytest.approx(2.5 / 3.5)


def test_a_lost_slot_makes_the_longest_gap(tmp_path: Path) -> None:
    """low decodes at 1, is displaced at 2 for three iterations and goes on."""
    config = make_config(max_num_seqs=1, priority_preemption=True)
    low = Arrival(0.0, make_request("low", 4, 12, priority=Priority.LOW))
    high = Arrival(1.5, make_request("high", 4, 3, priority=Priority.HIGH))
    found = summary_of(run([low, high], tmp_path / "t", config, cost=SECOND))
    assert found.preemptions == 1
    assert found.stall_s is not None and (found.stall_s.count, found.stall_s.max) == (2, 4.0)
    others = {"decode": 0.0, "prefill": 0.0, "steps": 0.0, "unexplained": 0.0}
    assert found.stall_causes == {"preemption": 1.0, **others}


def test_tokens_of_several_steps_come_together(tmp_path: Path) -> None:
    """Single steps until what a step takes is measured, then four at a time."""
    config = make_config(max_decode_steps=4, max_arrival_delay_s=100.0)
    found = summary_of(run([Arrival(0.0, make_request("a", 4, 48))], tmp_path / "t", config, cost=SECOND))
    single = StepTimeModel.MIN_STEPS - 1
    assert found.num_iterations == 1 + single + (47 - single) // 4
    assert found.itl_s is not None and (found.itl_s.count, found.itl_s.p50, found.itl_s.max) == (47, 0.0, 4.0)
    assert all_at(found.pace_s, 1.0)
    assert found.stall_causes is not None and found.stall_causes["steps"] == 1.0
    assert found.cost is not None and found.cost.fixed_s == pytest.approx(1.0)


def test_ends_of_every_kind_are_counted_and_only_completions_are_timed(tmp_path: Path) -> None:
    harness = Harness(make_config(max_queue_requests=1, max_num_seqs=4))
    for name in ("stopped", "failed", "aborted", "expired"):
        deadline_at = 1.5 if name == "expired" else None
        harness.add(make_request(name, 4, 9, deadline_at=deadline_at))
    harness.add(make_request("waits", 4, 1), make_request("refused"))
    harness.step()
    harness.step()
    harness.abort("stopped", reason=FinishReason.STOP)
    harness.abort("failed", reason=FinishReason.ERROR)
    harness.abort("aborted")
    harness.run()
    found = summary(harness, tmp_path / "t")
    assert found.ended == {"completed": 2, "aborted": 1, "expired": 1, "failed": 1}
    assert (found.offered, found.rejected) == (6, {"queue_full_requests": 1})
    assert found.output_tokens is not None and (found.output_tokens.count, found.output_tokens.max) == (2, 2)
    assert found.e2e_s is not None and found.e2e_s.count == 2


def test_a_step_in_flight_of_an_earlier_request_is_not_the_later_ones(tmp_path: Path) -> None:
    """The id is used again while a row of its first bearer is on the device."""
    harness = Harness(lag=1)
    harness.add(make_request("a", 4, 9))
    harness.step()
    harness.step()
    harness.abort("a")
    harness.add(make_request("a", 4, 3))
    harness.run()
    found = summary(harness, tmp_path / "t")
    assert found.output_tokens == Spread(1, 3, 3, 3, 3)
    assert found.ttft_s is not None and found.ttft_s.count == 2


def test_idle_slots_count_only_when_somebody_waited_before_the_plan(tmp_path: Path) -> None:
    """An arrival during a step takes the idle slot; those behind it wait in a queue that was empty."""
    config = make_config(max_num_seqs=2)
    arrivals = [Arrival(0.0, make_request("a", 4, 3))]
    arrivals += [Arrival(0.5, make_request(name, 4, 2)) for name in ("b", "c", "d")]
    found = summary_of(run(arrivals, tmp_path / "t", config, cost=SECOND))
    assert (found.blocked_on_pages, found.not_refilled) == (0.0, 0.0)


def test_a_front_without_pages_is_blocked_and_not_forgotten(tmp_path: Path) -> None:
    """Pages for one of the two at a time: b waits while a runs, in 3 of 6 iterations."""
    config = make_config(max_num_seqs=2, num_pages=4)
    arrivals = [Arrival(0.0, make_request("a", 8, 3)), Arrival(0.0, make_request("b", 8, 3))]
    path = run(arrivals, tmp_path / "t", config, cost=SECOND)
    found = summary_of(path)
    assert (found.num_iterations, found.blocked_on_pages, found.not_refilled) == (6, 0.5, 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_counts_are_the_schedulers_own_whatever_happens(tmp_path: Path, seed: int) -> None:
    harness = random_run(seed, lag=seed % 4)
    found, counters = summary(harness, tmp_path / "t"), harness.scheduler.counters
    assert (found.offered, found.rejected) == (counters.offered, counters.rejected)
    ended = {"completed": counters.completed, "aborted": counters.aborted}
    assert found.ended == {**ended, "expired": counters.expired, "failed": counters.failed}
    assert replace(found, source="") == replace(summary(harness, tmp_path / "again"), source="")
    num_tokens = sum(event.token_id is not None for event in harness.events)
    assert (found.ttft_s.count if found.ttft_s else 0) + (found.itl_s.count if found.itl_s else 0) == num_tokens
