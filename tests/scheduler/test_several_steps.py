"""Plans of several decode steps: when there are any and how many, and what their return means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.core import Request, SamplingParams
from jaxserve.scheduler import DecodeRow, DecodeRows, Scheduler, StepPlan, StepResult
from jaxserve.scheduler.step_time import StepTimeModel
from tests.scheduler.harness import STOP_ID, Harness, make_config, make_request, stopping_request


def several(**changes: Any) -> SchedulerConfig:
    """Up to 8 steps, without a bound by time."""
    return make_config(**({"max_decode_steps": 8, "max_arrival_delay_s": 1e9} | changes))


def measured(harness: Harness) -> Harness:
    """The same; it has seen iterations enough to believe that a step takes a second."""
    harness.measure(1.0)
    return harness


def decoding(*requests: Request, lag: int = 0, **changes: Any) -> Harness:
    """A harness in which the prompts of `requests` are computed and landed, and the next plan decodes."""
    harness = measured(Harness(several(**changes), lag))
    harness.add(*requests)
    while any(not sequence.decode_ready for sequence in harness.scheduler.holders):
        harness.step()
    return harness


def test_a_lone_request_gets_as_many_steps_as_there_may_be() -> None:
    harness = decoding(make_request("a", 4, 20))
    plan = harness.step()
    assert plan.num_steps == 8 and plan.decode == DecodeRows.of([DecodeRow("a", 0, 4, 8)])
    assert harness.outputs["a"] == [4, *range(5, 13)]


def test_off_means_one_step() -> None:
    harness = decoding(make_request("a", 4, 20), max_decode_steps=1)
    harness.run()
    assert {plan.num_steps for plan in harness.plans} == {1}


def test_no_more_steps_than_the_row_with_most_left_needs_and_each_row_its_own() -> None:
    harness = decoding(make_request("a", 4, 4), make_request("b", 4, 6))
    plan = harness.step()
    assert plan.num_steps == 5 and plan.decode.num_steps == (3, 5)
    assert plan.decode.num_tokens == 8
    assert harness.ends == {"a": "length", "b": "length"}


def test_while_somebody_waits_for_a_slot_no_step_follows_one_that_frees_one() -> None:
    harness = decoding(make_request("a", 4, 30), make_request("b", 4, 5), max_num_seqs=2)
    harness.add(make_request("c", 4, 4))
    assert harness.scheduler.num_waiting == 1
    plan = harness.step()
    assert plan.num_steps == 4 and harness.ends == {"b": "length"}
    plan = harness.step()
    assert plan.num_steps == 1 and [chunk.request_id for chunk in plan.prefill] == ["c"]


def test_a_request_that_waits_for_pages_brings_single_steps() -> None:
    harness = decoding(make_request("a", 4, 28), num_pages=9)
    assert harness.step().num_steps == 8
    harness.add(make_request("b", 4, 4))
    assert harness.scheduler.num_waiting == 1
    assert [harness.step().num_steps for _ in range(3)] == [1, 1, 1]
    harness.abort("b")
    assert harness.step().num_steps == 8


def test_the_plan_after_an_arrival_holds_its_prompt_beside_single_steps() -> None:
    harness = decoding(make_request("a", 4, 30))
    assert harness.step().num_steps == 8
    harness.add(make_request("b", 4, 4))
    plan = harness.step()
    assert plan.num_steps == 1 and [chunk.request_id for chunk in plan.prefill] == ["b"]
    assert [row.request_id for row in plan.decode] == ["a"]


def test_with_a_step_in_flight_an_arrival_is_in_the_next_plan_too() -> None:
    harness = decoding(make_request("a", 4, 60), lag=1)
    harness.step()
    assert harness.step().num_steps == 8
    harness.add(make_request("b", 4, 4))
    plan = harness.step()
    assert plan.num_steps == 1 and [chunk.request_id for chunk in plan.prefill] == ["b"]


def test_a_row_that_needs_the_host_brings_single_steps_for_all() -> None:
    harness = decoding(make_request("a", 4, 30), make_request("b", 4, 3, free_running=False))
    assert [harness.step().num_steps for _ in range(3)] == [1, 1, 8]


def test_a_paused_request_waits_for_the_slot_no_longer_than_by_single_steps() -> None:
    harness = decoding(make_request("low", 4, 20), max_num_seqs=1, priority_preemption=True)
    harness.add(make_request("high", 4, 12, priority=-1))
    harness.run()
    by_id = {name: [p.num_steps for p in harness.plans if name in p.decode.request_ids] for name in ("low", "high")}
    assert by_id["high"] == [8, 3], "one token of its twelve is the prompt's"
    assert by_id["low"][-1] > 1


def test_nothing_is_measured_at_first() -> None:
    harness = Harness(several(), lag=1)
    harness.add(make_request("a", 4, 40))
    plans = [harness.step() for _ in range(StepTimeModel.MIN_STEPS + 2)]
    assert [plan.num_steps for plan in plans] == [1] * (StepTimeModel.MIN_STEPS + 1) + [8]


@pytest.mark.parametrize(
    ("lag", "delay_s", "num_steps"), [(0, 0.0, 1), (0, 0.9, 1), (0, 3.1, 4), (1, 3.1, 2), (1, 6.2, 4), (2, 6.2, 3)]
)
def test_an_arrival_loses_no_more_than_the_flag_says(lag: int, delay_s: float, num_steps: int) -> None:
    """Each plan that may be in flight has the same share of what it may lose."""
    harness = decoding(make_request("a", 4, 50), lag=lag, max_arrival_delay_s=delay_s)
    harness.step()
    plan = harness.plan()
    assert plan.num_steps == num_steps
    assert (plan.num_steps - 1) * 1.0 * (1 + lag) <= delay_s


@pytest.mark.parametrize(("target_s", "num_steps"), [(None, 8), (3.5, 3), (0.5, 1)])
def test_steps_keep_within_the_target_of_an_iteration(target_s: float | None, num_steps: int) -> None:
    harness = decoding(make_request("a", 4, 50), itl_target_s=target_s)
    assert harness.step().num_steps == num_steps
    classes = (ServiceClass("quick", itl_target_s=target_s),)
    harness = decoding(
        make_request("a", 4, 50), make_request("b", 4, 9, service_class="quick"), service_classes=classes
    )
    assert harness.step().num_steps == num_steps


def test_a_step_is_measured_by_what_several_took_together() -> None:
    config = several(max_arrival_delay_s=3.0)
    scheduler = Scheduler(config)
    scheduler.add(make_request("a", 4, 60), 0.0)
    now = 0.0
    steps = []
    for _ in range(30):
        plan = scheduler.schedule(now)
        now += 0.25 * plan.num_steps  # four steps a second
        if plan.prefill:
            result = StepResult((), (1,))
        elif plan.num_steps == 1:
            result = StepResult((1,), ())
        else:
            result = StepResult((), (), ((1,) * plan.num_steps,))
        steps.append(plan.num_steps)
        scheduler.update(plan, result, now)
        if scheduler.idle:
            break
    assert max(steps) == 8 and sum(steps) == 60


def test_a_stop_id_ends_a_row_in_the_midst_of_its_steps() -> None:
    harness = measured(Harness(several(), sample=lambda name, at: STOP_ID if (name, at) == ("a", 7) else at))
    harness.add(stopping_request("a", 4, 20), stopping_request("b", 4, 20))
    harness.step()
    plan = harness.step()
    assert plan.decode.num_steps == (8, 8)
    assert harness.outputs["a"] == [4, 5, 6, STOP_ID] and harness.ends["a"] == "stop"
    assert harness.outputs["b"] == list(range(4, 13))
    assert harness.scheduler.counters.wasted_rows == 0


def test_min_tokens_let_a_stop_id_pass() -> None:
    harness = measured(Harness(several(), sample=lambda name, at: STOP_ID if at in (6, 8, 11) else at))
    harness.add(stopping_request("a", 4, 20, min_tokens=5))
    harness.step()
    harness.step()
    assert harness.outputs["a"] == [4, 5, STOP_ID, 7, STOP_ID, 9, 10, STOP_ID]
    assert harness.ends["a"] == "stop"


def test_tokens_beyond_an_end_are_dropped_whatever_the_device_says() -> None:
    scheduler = measured(Harness(several())).scheduler
    scheduler.add(stopping_request("a", 4, 20), 0.0)
    scheduler.update(scheduler.schedule(0.0), StepResult((), (1,)), 1.0)
    plan = scheduler.schedule(1.0)
    events = scheduler.update(plan, StepResult((), (), ((2, STOP_ID, 3, 4),)), 2.0)
    assert [event.token_id for event in events] == [2, STOP_ID] and events.num_tokens == len(events) == 2
    assert [event.finish_reason for event in events] == [None, "stop"]
    assert events.num_wasted == scheduler.counters.wasted_rows == 2
    assert scheduler.idle


def test_a_live_row_that_brings_too_few_tokens_is_noticed() -> None:
    scheduler = measured(Harness(several())).scheduler
    scheduler.add(make_request("a", 4, 20), 0.0)
    scheduler.update(scheduler.schedule(0.0), StepResult((), (1,)), 1.0)
    plan = scheduler.schedule(1.0)
    with pytest.raises(AssertionError, match="a brought 3 tokens"):
        scheduler.update(plan, StepResult((), (), ((2, 3, 4),)), 2.0)


def test_the_rest_of_an_aborted_requests_steps_is_dropped_and_counted() -> None:
    harness = decoding(make_request("a", 4, 50), make_request("b", 4, 50), lag=1)
    harness.plan()
    before = list(harness.outputs["a"])
    harness.abort("a")
    harness.run()
    assert harness.outputs["a"][: len(before)] == before and harness.ends["a"] == "abort"
    assert len(harness.outputs["a"]) < 50 and len(harness.outputs["b"]) == 50
    assert harness.scheduler.counters.wasted_rows > 1


def test_steps_are_as_many_as_pages_allow_without_preempting_anybody() -> None:
    # Of 7 pages the prompts take 2; 8 steps take 2 pages more of each: 1 is left.
    harness = decoding(
        make_request("a", 4, 24),
        make_request("b", 4, 24),
        num_pages=8,
        reservation="optimistic",
        preemption="recompute",
    )
    plan = harness.step()
    assert plan.num_steps == 8 and not harness.scheduler.counters.preemptions
    assert harness.scheduler.pages_free == 1
    plan = harness.step()
    assert plan.num_steps == 1, "each needs a page, and there is one: somebody is preempted"


def test_the_exact_reservation_has_single_steps_while_its_promises_exceed_the_pages() -> None:
    # 3, 9 and 2 pages in the end, of which there are 12: "a" is gone when "b" is longest.
    harness = decoding(make_request("a", 4, 8), make_request("b", 4, 32), num_pages=13, reservation="exact")
    scheduler = harness.scheduler
    harness.add(make_request("c", 4, 4))
    harness.step()
    assert scheduler.active_ids == ["a", "b", "c"]
    assert scheduler._reservation.num_promised > scheduler.pages_free, "the promises fit: the test shows nothing"
    assert harness.step().num_steps == 1
    harness.run()
    assert harness.plans[-1].num_steps > 1


def test_tenants_are_charged_for_every_step() -> None:
    charged = []
    for steps in (1, 8):
        harness = decoding(
            make_request("a", 4, 20, tenant="x"),
            make_request("b", 4, 9, tenant="y"),
            policy="fair",
            max_decode_steps=steps,
        )
        while "b" in harness.scheduler.live_ids or len(harness.outputs["a"]) < 17:
            harness.step()
        counters = harness.scheduler._order.counters
        assert counters is not None
        charged.append((counters["x"], counters["y"]))
    assert charged[0] == charged[1]


def test_pages_filled_within_several_steps_are_cached() -> None:
    harness = decoding(make_request("a", 4, 21), enable_prefix_caching=True)
    harness.run()
    # 4 prompt tokens and 20 outputs are written, the last output is not: 6 pages of 4, of which the last is full.
    assert harness.scheduler.pages_cached == 6
    cached = harness.scheduler.counters.cached_tokens
    harness.add(Request("again", (*range(100, 104), *range(4, 24), 7), SamplingParams(), max_tokens=2))
    harness.run()
    assert harness.scheduler.counters.cached_tokens - cached == 24


def test_a_plan_turns_rows_into_columns_and_back() -> None:
    rows = [DecodeRow("a", 0, 4, 3), DecodeRow("b", 2, 9, 1)]
    columns = DecodeRows.of(rows)
    assert list(columns) == rows and columns[0] == rows[0] and list(columns[1:]) == rows[1:]
    single = DecodeRows.of([replace(row, num_steps=1) for row in rows])
    assert single.num_steps == () and [row.num_steps for row in single] == [1, 1] and single.num_tokens == 2
    assert StepPlan(0, columns, num_steps=3).num_tokens == 2
