"""A step failed: who stands where afterwards, who may run meanwhile, and how large plans are."""

import pytest

from jaxserve.scheduler.waits_for import WaitsFor
from tests.scheduler.harness import Harness, make_config, make_request


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("keeps_pool", [True, False])
def test_everybody_gets_the_tokens_of_a_run_without_failures(lag: int, keeps_pool: bool) -> None:
    outputs = []
    for fails in (False, True):
        harness = Harness(make_config(enable_prefix_caching=True), lag)
        harness.add(*(make_request(f"r{index}", 3 + 5 * index, 9) for index in range(6)))
        for _ in range(8):
            harness.step()
            if fails:
                harness.step()
                harness.fail(keeps_pool=keeps_pool)
        harness.run()
        outputs.append(harness.outputs)
        assert harness.scheduler.counters.recoveries == (8 if fails else 0)
    assert outputs[0] == outputs[1]


def test_those_that_ran_stand_first_in_the_order_in_which_they_got_their_slots() -> None:
    harness = Harness(make_config(max_num_seqs=2, policy="priority"), lag=1)
    harness.add(*(make_request(name, 4, 8, priority=5) for name in ("low", "other")))
    harness.plan()
    harness.add(make_request("high", 4, 8, priority=-5))
    assert harness.fail(keeps_pool=True) == ["low", "other"]
    assert harness.scheduler.waiting_ids == ["low", "other", "high"]
    assert [placement.request_id for placement in harness.plan().placements] == ["low", "other"]


def test_one_whose_last_row_was_in_flight_is_computed_again() -> None:
    harness = Harness(lag=1)
    harness.add(make_request("a", 4, 2))
    harness.plan()
    harness.plan()
    assert harness.scheduler.active_ids == [] and harness.scheduler.num_running == 1
    assert harness.fail(keeps_pool=True) == ["a"] and harness.scheduler.waiting_ids == ["a"]
    harness.run()
    assert harness.outputs["a"] == [4, 5] and harness.ends["a"] == "length"


def test_numbers_of_plans_are_given_again_and_pages_of_ended_requests_are_free() -> None:
    harness = Harness(lag=2)
    harness.add(make_request("a", 4, 9), make_request("b", 4, 9))
    harness.step()
    harness.step()
    harness.abort("a")
    assert harness.scheduler.num_plans == 2 and harness.scheduler.pages_owned > 0
    assert harness.fail(keeps_pool=False) == ["b"]
    assert harness.scheduler.num_plans == 0 and harness.scheduler.pages_owned == 0
    assert harness.plan().iteration == 0


def test_the_prefix_cache_is_kept_with_the_pool_and_lost_with_it() -> None:
    for keeps_pool in (True, False):
        harness = Harness(make_config(enable_prefix_caching=True))
        harness.add(make_request("a", 8, 9))
        for _ in range(3):
            harness.step()
        harness.fail(keeps_pool=keeps_pool)
        assert (harness.scheduler.pages_cached > 0) == keeps_pool
        (chunk,) = harness.plan().prefill
        assert chunk.start == (8 if keeps_pool else 0)


def test_with_windows_nothing_is_found_again() -> None:
    harness = Harness(make_config(enable_prefix_caching=True, sliding_window=4))
    harness.add(make_request("a", 8, 9))
    for _ in range(3):
        harness.step()
    harness.fail(keeps_pool=True)
    assert harness.scheduler.pages_cached == 0


def test_who_is_held_waits_and_nobody_who_never_ran_takes_its_place() -> None:
    harness = Harness(make_config(max_num_seqs=4))
    harness.add(make_request("a", 4, 6), make_request("b", 4, 6))
    harness.step()
    harness.fail(keeps_pool=True)
    scheduler = harness.scheduler
    assert scheduler.hold("b", harness.now) and not scheduler.hold("b", harness.now)
    assert not scheduler.hold("nobody", harness.now) and scheduler.held_ids == ["b"]
    harness.add(make_request("new", 4, 2))
    for _ in range(3):
        assert {chunk.request_id for chunk in harness.step().prefill} <= {"a"}
        assert scheduler.active_ids == ["a"] and set(scheduler.waiting_ids) == {"b", "new"}
    assert harness.records[-1]["front_waits_for"] == WaitsFor.RELEASE
    assert scheduler.release("b", harness.now) and not scheduler.release("b", harness.now)
    harness.step()
    assert scheduler.active_ids == ["a", "b", "new"]
    harness.run()
    assert harness.outputs["b"] == list(range(4, 10))


def test_one_that_runs_is_not_held_and_one_that_is_held_may_end() -> None:
    harness = Harness()
    harness.add(make_request("a", 4, 6), make_request("b", 4, 6, deadline_at=harness.now + 3.5))
    harness.step()
    assert not harness.scheduler.hold("a", harness.now)
    harness.fail(keeps_pool=True)
    for name in ("a", "b"):
        assert harness.scheduler.hold(name, harness.now)
    assert harness.abort("a")
    for _ in range(4):
        harness.step()
    assert harness.ends == {"a": "abort", "b": "expired"} and harness.scheduler.idle


def test_a_small_budget_limits_tokens_slots_and_steps() -> None:
    config = make_config(max_num_seqs=4, max_decode_steps=8, max_arrival_delay_s=1e6)
    harness = Harness(config)
    harness.measure()
    harness.scheduler.limit_budget(3, harness.now)
    harness.add(*(make_request(f"r{index}", 7, 9) for index in range(4)))
    while harness.scheduler.num_waiting:
        plan = harness.step()
        assert plan.num_tokens <= 3 and len(harness.scheduler.active_ids) <= 3 and plan.num_steps == 1
    harness.scheduler.limit_budget(16, harness.now)
    harness.run()
    assert any(plan.num_steps > 1 for plan in harness.plans)


def test_a_budget_of_one_token_still_brings_everybody_to_an_end() -> None:
    harness = Harness()
    harness.scheduler.limit_budget(1, harness.now)
    harness.add(*(make_request(f"r{index}", 5, 4) for index in range(3)))
    harness.run()
    assert all(plan.num_tokens == 1 for plan in harness.plans)
    assert list(harness.outputs.values()) == [[5, 6, 7, 8]] * 3


def test_pages_of_one_that_ends_broken_are_found_by_nobody() -> None:
    for forgets in (False, True):
        harness = Harness(make_config(enable_prefix_caching=True))
        harness.add(make_request("a", 12, 9), make_request("b", 12, 9))
        for _ in range(4):
            harness.step()
        assert harness.scheduler.num_cached_tokens(make_request("c", 12)) == 8
        harness.abort("a", reason="error", forgets=forgets)
        assert harness.scheduler.num_cached_tokens(make_request("c", 12)) == (0 if forgets else 8)
        harness.run()
        assert harness.outputs["b"] == list(range(12, 21))


def test_one_that_waits_for_its_imported_pages_keeps_them_and_one_that_had_them_computes() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.add(make_request("a", 9, 4, num_imported_tokens=8), make_request("b", 9, 4, num_imported_tokens=8))
    assert [move.request_id for move in harness.step().imports] == ["a"]
    harness.fail(keeps_pool=False)
    plan = harness.step()
    assert not plan.imports and plan.prefill[0].start == 0
    harness.run()
    assert sum(move.request_id == "b" for plan in harness.plans for move in plan.imports) == 1
    assert harness.outputs == {"a": [9, 10, 11, 12], "b": [9, 10, 11, 12]}
