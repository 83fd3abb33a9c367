"""Ends: stop ids, aborts at any stage, deadlines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxserve.core import FinishReason, SamplingParams
from tests.scheduler.harness import STOP_ID, Harness, make_config, make_request, stopping_request

ALWAYS_STOP: Callable[[str, int], int] = lambda name, at: STOP_ID  # noqa: E731


def test_a_stop_id_ends_the_output_and_belongs_to_it() -> None:
    harness = Harness(sample=lambda _, at: STOP_ID if at == 6 else at)
    harness.add(stopping_request("a", 4, 20))
    harness.run()
    assert harness.outputs["a"] == [4, 5, STOP_ID]
    last = harness.events[-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", STOP_ID)


def test_a_stop_id_as_the_last_granted_token_counts_as_stop() -> None:
    harness = Harness(sample=lambda _, at: STOP_ID if at == 6 else at)
    harness.add(stopping_request("a", 4, 3))
    harness.run()
    assert harness.ends["a"] == "stop"


def test_ignore_eos_makes_it_an_ordinary_token() -> None:
    harness = Harness(sample=ALWAYS_STOP)
    params = SamplingParams(ignore_eos=True)
    harness.add(make_request("a", 4, 3, params=params, eos_token_ids=(STOP_ID,)))
    harness.run()
    assert harness.outputs["a"] == [STOP_ID] * 3 and harness.ends["a"] == "length"


def test_ignore_eos_does_not_touch_stop_token_ids() -> None:
    harness = Harness(sample=ALWAYS_STOP)
    params = SamplingParams(ignore_eos=True, stop_token_ids=(STOP_ID,))
    harness.add(make_request("a", 4, 3, params=params, eos_token_ids=(STOP_ID,)))
    harness.run()
    assert harness.outputs["a"] == [STOP_ID] and harness.ends["a"] == "stop"


def test_stop_ids_are_held_off_for_min_tokens() -> None:
    harness = Harness(sample=ALWAYS_STOP)
    harness.add(stopping_request("a", 50, 10, min_tokens=4))
    harness.run()
    assert len(harness.outputs["a"]) == 5


STAGES = ["waiting", "placed", "mid_prompt", "decoding", "last_step", "paused"]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_abort_at_any_stage_ends_once_and_leaves_others_whole(stage: str, lag: int) -> None:
    harness = Harness(make_config(max_num_seqs=2, priority_preemption=True), lag)
    harness.add(make_request("other", 9, 20, priority=-5))
    target = make_request("target", 20, 4)
    if stage == "waiting":
        harness.add(make_request("third", 5, 30, priority=-5), target)
    else:
        harness.add(target)
    for _ in range({"mid_prompt": 2, "decoding": 4, "last_step": 5 + lag, "paused": 4}.get(stage, 0)):
        harness.step()
    if stage == "paused":
        harness.add(make_request("urgent", 5, 12, priority=-5))
        assert harness.scheduler.waiting_ids == ["target"]
    assert harness.abort("target") and not harness.abort("target")
    assert harness.ends["target"] == "abort"
    harness.run()
    assert harness.outputs["other"] == list(range(9, 29))
    assert harness.scheduler.counters.aborted == 1
    assert harness.scheduler.pages_owned == 0 and harness.scheduler.num_free_slots == 2


@pytest.mark.parametrize("lag", [0, 1])
def test_an_abort_at_the_finishing_instant_finds_nobody(lag: int) -> None:
    harness = Harness(lag=lag)
    harness.add(make_request("a", 4, 2))
    harness.run()
    assert not harness.abort("a") and harness.ends == {"a": "length"}


def test_abort_of_an_unknown_id_is_refused_quietly() -> None:
    assert not Harness().abort("nobody")


def test_a_stop_string_found_by_the_caller_counts_as_completed() -> None:
    harness = Harness()
    harness.add(make_request("a", 4, 20))
    harness.step()
    harness.abort("a", reason=FinishReason.STOP)
    assert harness.ends == {"a": "stop"} and harness.scheduler.counters.completed == 1


def test_a_failed_request_counts_as_failed() -> None:
    harness = Harness()
    harness.add(make_request("a"))
    harness.abort("a", reason=FinishReason.ERROR)
    assert harness.scheduler.counters.failed == 1


def test_deadlines_end_waiting_and_running_requests_in_order_of_deadline() -> None:
    harness = Harness(make_config(max_num_seqs=2))
    harness.add(
        make_request("late", 4, 50, deadline_at=5.0),
        make_request("free", 4, 12),
        make_request("soon", 4, 50, deadline_at=3.0),
        make_request("sooner", 4, 50, deadline_at=3.0),
        make_request("never", 4, 3, deadline_at=1000.0),
    )
    harness.run()
    assert list(harness.ends) == ["soon", "sooner", "late", "never", "free"]
    assert [harness.ends[i] for i in ("soon", "late", "never")] == ["expired", "expired", "length"]
    assert harness.scheduler.counters.expired == 3
    assert len(harness.outputs["late"]) == 5  # it expires before the plan of its deadline


def test_a_deadline_does_not_outlive_its_request() -> None:
    harness = Harness()
    for _ in range(100):
        harness.add(make_request("a", 4, 1, deadline_at=harness.now + 1e6))
        harness.run()
    heap = harness.scheduler._deadlines
    assert len(heap) == 0 and len(heap._heap) <= 2 * heap._SLACK
