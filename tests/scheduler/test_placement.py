"""Arrivals: who gets a slot at once, who waits, who is refused, who is preempted."""

from __future__ import annotations

import pytest

from jaxserve.core import Priority, Request
from tests.scheduler.harness import Harness, make_config, make_request


def reasons(harness: Harness, *requests: Request) -> list[str | None]:
    """Rejection reason per request, None for the accepted."""
    return [answer.reason if answer else None for answer in harness.add(*requests)]


def test_lowest_free_slot_goes_first() -> None:
    harness = Harness()
    harness.add(make_request("a"), make_request("b"), make_request("c"))
    harness.abort("b")
    harness.abort("a")
    harness.add(make_request("d"), make_request("e"))
    assert [harness.scheduler.sequence(i).slot for i in "dec"] == [0, 1, 2]


def test_lowest_free_pages_go_first() -> None:
    harness = Harness(make_config(prefill_chunk=16))
    harness.add(make_request("a", 8), make_request("b", 8))
    harness.step()
    harness.abort("a")
    harness.add(make_request("c", 12))
    harness.step()
    # 1 and 2 were a's; b took 5 for its first output meanwhile, being ahead of c in the plan.
    assert harness.scheduler.sequence("b").holdings[0].pages == [3, 4, 1]
    assert harness.scheduler.sequence("c").holdings[0].pages == [2, 5, 6]


def test_queue_bound_in_requests_is_decided_at_once() -> None:
    harness = Harness(make_config(max_num_seqs=2, max_queue_requests=3))
    answers = reasons(harness, *(make_request(f"r{i}") for i in range(10)))
    assert answers == [None] * 5 + ["queue_full_requests"] * 5
    harness.run()
    again = reasons(harness, *(make_request(f"r{i}") for i in range(5)))
    assert again == [None] * 5


def test_queue_bound_in_tokens_counts_prompt_and_output() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_tokens=20))
    assert reasons(harness, make_request("running", 30, 30)) == [None]
    assert reasons(harness, make_request("a", 6, 6), make_request("b", 4, 5)) == [None, "queue_full_tokens"]
    assert reasons(harness, make_request("c", 4, 4)) == [None]
    assert harness.scheduler.num_waiting_tokens == 20


def test_without_a_queue_free_slots_are_still_served() -> None:
    harness = Harness(make_config(max_num_seqs=2, max_queue_requests=0))
    answers = reasons(harness, *(make_request(f"r{i}") for i in range(3)))
    assert answers == [None, None, "queue_full_requests"]


@pytest.mark.parametrize(
    ("prompt", "output", "message"),
    [
        (65, 0, r"prompt has 65 tokens; the limit is 64 \(max_model_len\)"),
        (60, 5, r"prompt has 60 tokens and max_tokens is 5, together 65; the limit is 64 \(max_model_len\)"),
        (21, 20, r"41 tokens and need 11 KV pages of 4; the pool has 10 \(num_pages\)"),
    ],
)
def test_what_never_fits_is_refused_naming_limit_and_value(prompt: int, output: int, message: str) -> None:
    harness = Harness(make_config(num_pages=11))
    (rejection,) = harness.add(make_request("a", prompt, output))
    assert rejection is not None and rejection.reason == "never_fits" and rejection.retry_after_s is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(rejection.message)


def test_largest_request_of_the_context_and_of_the_pool_is_served() -> None:
    harness = Harness(make_config(num_pages=17))
    assert reasons(harness, make_request("a", 64, 0)) == [None]
    harness.run()
    assert reasons(harness, make_request("b", 1, 63)) == [None]
    harness.run()
    assert harness.ends == {"a": "length", "b": "length"}


def test_an_empty_prompt_is_the_callers_mistake_and_counts_nowhere() -> None:
    harness = Harness()
    with pytest.raises(ValueError, match="prompt of a has 0 tokens; it must have at least 1"):
        harness.add(make_request("a", 0))
    assert harness.scheduler.counters.offered == 0


def test_a_live_id_is_refused_and_its_holder_untouched() -> None:
    harness = Harness()
    harness.add(make_request("a", 4, 3))
    harness.step()
    assert reasons(harness, make_request("a", 9, 9)) == ["duplicate_id"]
    harness.run()
    assert harness.outputs["a"] == [4, 5, 6]
    assert reasons(harness, make_request("a", 5, 1)) == [None]


def test_a_deadline_already_passed_is_refused() -> None:
    harness = Harness()
    harness.now = 5.0
    assert reasons(harness, make_request("a", deadline_at=5.0), make_request("b", deadline_at=5.1)) == [
        "deadline",
        None,
    ]


def test_refused_requests_leave_nothing_but_their_count() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=0))
    reasons(harness, make_request("a"), make_request("a"), make_request("b"), make_request("c", 100))
    assert harness.scheduler.counters.rejected == {"duplicate_id": 1, "queue_full_requests": 1, "never_fits": 1}
    assert harness.scheduler.live_ids == ["a"]


def test_nobody_overtakes_a_front_that_lacks_pages() -> None:
    harness = Harness(make_config(num_pages=11))
    harness.add(make_request("a", 16, 8), make_request("big", 20, 12), make_request("small", 1, 1))
    harness.step()
    assert harness.scheduler.waiting_ids == ["big", "small"] and harness.scheduler.num_free_slots == 3
    harness.run()
    assert list(harness.ends) == ["a", "small", "big"]  # small is shorter; both started when a ended
    first = {i: next(n for n, plan in enumerate(harness.plans) if i in str(plan.placements)) for i in ("big", "small")}
    assert first["big"] == first["small"]


def test_an_arrival_waits_behind_the_queue_unless_it_may_claim_slots() -> None:
    for claims, waiting in ((False, ["b", "c"]), (True, ["b"])):
        harness = Harness(make_config(max_num_seqs=1, arrivals_claim_slots=claims))
        harness.add(make_request("a"), make_request("b"))
        harness.abort("a")
        harness.add(make_request("c"))
        assert harness.scheduler.waiting_ids == waiting


@pytest.mark.parametrize(("priority", "active"), [(Priority.HIGH, "urgent"), (Priority.NORMAL, None)])
def test_a_slot_that_happens_to_be_free_goes_to_the_higher_class(priority: int, active: str | None) -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True))
    harness.add(make_request("a"), make_request("b"))
    harness.abort("a")
    harness.add(make_request("urgent", priority=priority))
    assert harness.scheduler.active_ids == ([active] if active else [])


def test_equal_classes_never_preempt() -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True))
    harness.add(make_request("a"), make_request("b"))
    harness.step()
    assert harness.scheduler.active_ids == ["a"] and harness.scheduler.counters.preemptions == 0


def test_victim_is_of_the_lowest_class_then_most_remaining_work_then_latest() -> None:
    harness = Harness(make_config(priority_preemption=True))
    harness.add(
        make_request("long_normal", 4, 40),
        make_request("short_low", 4, 4, priority=Priority.LOW),
        make_request("long_low", 4, 20, priority=Priority.LOW),
        make_request("late_long_low", 4, 20, priority=Priority.LOW),
    )
    high = [make_request(f"h{i}", priority=Priority.HIGH) for i in range(5)]
    harness.add(*high)
    assert harness.scheduler.counters.preemptions == 4
    plan = harness.step()
    assert plan.preempted == ("late_long_low", "long_low", "short_low", "long_normal")
    assert harness.scheduler.waiting_ids[-1] == "h4"  # nobody left to preempt


def test_an_urgent_arrival_without_pages_disturbs_nobody() -> None:
    harness = Harness(make_config(max_num_seqs=1, num_pages=11, priority_preemption=True))
    harness.add(make_request("low", 10, 10, priority=Priority.LOW))
    harness.step()
    harness.add(make_request("urgent", 20, 10, priority=Priority.HIGH))
    assert harness.scheduler.counters.preemptions == 0
    assert harness.scheduler.waiting_ids == ["urgent"]


def test_an_urgent_arrival_is_refused_when_the_victim_has_no_place_in_the_queue() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=0, priority_preemption=True))
    harness.add(make_request("low", priority=Priority.LOW))
    assert reasons(harness, make_request("urgent", priority=Priority.HIGH)) == ["queue_full_requests"]
    assert harness.scheduler.active_ids == ["low"]


def test_a_paused_request_stands_in_front_of_those_that_never_ran() -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True, arrivals_claim_slots=True))
    harness.add(make_request("first"), make_request("waits"))
    harness.abort("first")
    harness.add(make_request("passes"), make_request("urgent", priority=Priority.HIGH))
    assert harness.scheduler.waiting_ids == ["passes", "waits"]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_paused_request_resumes_where_it_stopped(lag: int) -> None:
    for steps in range(1, 9):
        harness = Harness(make_config(max_num_seqs=1, priority_preemption=True), lag)
        harness.add(make_request("low", 20, 8, priority=Priority.LOW), make_request("next", priority=Priority.LOW))
        for _ in range(steps):
            harness.step()
        harness.add(make_request("urgent", 3, 2, priority=Priority.HIGH))
        assert harness.scheduler.sequence("low").num_preemptions == 1
        harness.run()
        assert harness.outputs == {"low": list(range(20, 28)), "next": [4, 5, 6, 7], "urgent": [3, 4]}
        assert list(harness.ends) == ["urgent", "low", "next"]
        # Paused, not recomputed: every prompt token was computed once.
        assert sum(len(c.token_ids) for plan in harness.plans for c in plan.prefill) == 20 + 4 + 3


def test_retry_after_has_a_default_and_follows_the_pace_of_departures() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=2))
    (*_, first) = harness.add(*(make_request(f"a{i}", 1, 2) for i in range(4)))
    assert first is not None and first.retry_after_s == 1.0
    harness.run()  # three departures, one every two steps
    (*_, second) = harness.add(*(make_request(f"b{i}", 1, 2) for i in range(4)))
    harness.now += 100.0
    (third,) = harness.add(make_request("c"))
    assert second is not None and second.retry_after_s is not None
    assert third is not None and third.retry_after_s is not None
    assert 2.0 <= second.retry_after_s <= 5.0
    assert third.retry_after_s > 10 * second.retry_after_s  # nothing left since: the answer grows
