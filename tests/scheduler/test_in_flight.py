"""Plans ahead of results: late tokens, slots and pages of the ended, ids that come again."""

from __future__ import annotations

import pytest

from jaxserve.scheduler import StepResult
from tests.scheduler.harness import STOP_ID, Harness, make_config, make_request, stopping_request


def stop_at(position: int) -> Harness:
    """One step ahead, every request samples STOP_ID at `position`."""
    return Harness(lag=1, sample=lambda _, at: STOP_ID if at == position else at)


def test_tokens_sampled_beyond_a_stop_are_dropped() -> None:
    harness = stop_at(6)
    harness.add(stopping_request("a", 4, 20))
    harness.run()
    assert harness.outputs["a"] == [4, 5, STOP_ID] and harness.ends["a"] == "stop"
    assert len(harness.plans) == 4  # the prompt, two tokens, and the one that was in vain


def test_pages_of_an_ended_request_return_when_its_last_step_has_landed() -> None:
    harness = stop_at(4)
    harness.add(stopping_request("a", 4, 20))
    harness.step()
    harness.step()
    assert harness.ends == {"a": "stop"}
    assert harness.scheduler.pages_owned == 2 and not harness.scheduler.idle
    assert harness.scheduler.num_free_slots == 4
    harness.step()
    assert harness.scheduler.pages_owned == 0 and harness.scheduler.idle


def test_an_id_may_return_while_a_step_of_its_first_holder_is_in_flight() -> None:
    harness = Harness(lag=1)
    harness.add(make_request("a", 4, 20))
    harness.step()
    harness.step()
    harness.abort("a")
    assert harness.add(make_request("a", 9, 3)) == [None]
    harness.run()
    assert harness.outputs["a"] == [9, 10, 11]


def test_the_slot_of_a_request_that_ends_by_length_is_used_by_the_next_plan() -> None:
    harness = Harness(make_config(max_num_seqs=1), lag=1)
    harness.add(*(make_request(f"r{i}", 4, 5) for i in range(4)))
    harness.run()
    assert len(harness.plans) == 4 * 5  # no iteration without a row
    assert all(harness.outputs[f"r{i}"] == [4, 5, 6, 7, 8] for i in range(4))


def test_updates_come_in_the_order_of_plans() -> None:
    scheduler = Harness(lag=1).scheduler
    scheduler.add(make_request("a"), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="plan 1 is updated before plan 0"):
        scheduler.update(second, StepResult((0,), ()), 0.0)
    assert first.iteration == 0


def test_an_answer_of_the_wrong_length_is_noticed() -> None:
    scheduler = Harness().scheduler
    scheduler.add(make_request("a"), 0.0)
    plan = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(plan, StepResult((), ()), 0.0)


def test_a_paused_request_can_end_by_the_token_that_was_in_flight() -> None:
    harness = Harness(
        make_config(max_num_seqs=1, priority_preemption=True),
        lag=1,
        sample=lambda name, at: STOP_ID if (name, at) == ("low", 5) else at,
    )
    harness.add(stopping_request("low", 4, 20))
    harness.step()
    harness.step()
    harness.add(make_request("urgent", 4, 6, priority=-1))
    assert harness.scheduler.waiting_ids == ["low"]
    harness.step()
    assert harness.ends == {"low": "stop"} and harness.scheduler.num_waiting == 0
    harness.run()
    assert harness.outputs == {"low": [4, STOP_ID], "urgent": [4, 5, 6, 7, 8, 9]}


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_output_does_not_depend_on_how_far_planning_runs_ahead(lag: int) -> None:
    def outputs(lag: int) -> dict[str, list[int]]:
        harness = Harness(lag=lag, sample=lambda name, at: STOP_ID if (at + len(name)) % 11 == 0 else at)
        harness.add(*(stopping_request("r" * (i + 1), 3 + 5 * i, 12) for i in range(8)))
        harness.run()
        return harness.outputs

    assert outputs(lag) == outputs(0)


def test_a_paused_request_waits_for_the_token_its_next_row_feeds() -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True), lag=1)
    harness.add(make_request("low", 4, 6))
    harness.step()
    harness.step()
    harness.add(make_request("urgent", priority=-1))
    harness.abort("urgent")
    # The slot is free again, but the token low's row would feed was in it and is not on the host yet.
    assert harness.step().empty
    (placement,) = harness.step().placements
    assert (placement.num_output_tokens, placement.last_token_id) == (2, 5)
    harness.run()
    assert harness.outputs["low"] == [4, 5, 6, 7, 8, 9]
