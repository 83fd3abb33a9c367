"""Arrivals of one call: all of them get a place, or none does and nobody loses one."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ServiceClass
from jaxserve.core import Priority, Request
from jaxserve.scheduler import Scheduler
from tests.scheduler.harness import Harness, make_config, make_request
from tests.scheduler.test_random_runs import draw_config, draw_request


def choices(count: int, name: str = "new", prompt: int = 4, output: int = 4, **fields: object) -> list[Request]:
    return [make_request(f"{name}#{index}", prompt, output, **fields) for index in range(count)]


def full_harness(waiting: list[Request], **changes: object) -> Harness:
    """One slot, held by a request of high class; `waiting` fill the queue, of three places."""
    harness = Harness(make_config(**{"max_num_seqs": 1, "max_queue_requests": 3} | changes))
    harness.add(make_request("runs", 4, 20, priority=Priority.HIGH), *waiting)
    harness.step()
    return harness


def test_they_take_free_slots_and_then_places_in_the_queue_in_order() -> None:
    harness = Harness(make_config(max_num_seqs=2, max_queue_requests=2))
    assert harness.add_all(choices(4)) is None
    assert (harness.scheduler.active_ids, harness.scheduler.waiting_ids) == (["new#0", "new#1"], ["new#2", "new#3"])
    harness.run()
    assert set(harness.ends.values()) == {"length"}


def test_one_too_many_refuses_them_all_and_frees_what_the_first_had() -> None:
    harness = Harness(make_config(max_num_seqs=2, max_queue_requests=2))
    rejection = harness.add_all(choices(5))
    assert rejection is not None and rejection.reason == "queue_full_requests"
    assert rejection.message == (
        "0 requests wait and 3 come together; the limit is 2 (max_queue_requests); try again later"
    )
    scheduler = harness.scheduler
    assert scheduler.idle and scheduler.num_free_slots == 2 and scheduler.pages_owned == 0
    assert (scheduler.counters.offered, scheduler.counters.rejected) == (5, {"queue_full_requests": 5})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_queue_tokens": 30}, "queue_full_tokens"),
        ({"service_classes": (ServiceClass("bulk", max_queue_requests=1),)}, "queue_full_class_requests"),
        ({"service_classes": (ServiceClass("bulk", max_queue_tokens=15),)}, "queue_full_class_tokens"),
    ],
)
def test_every_bound_is_checked_for_all_of_them_beforehand(changes: dict[str, object], reason: str) -> None:
    harness = full_harness([make_request("waits", 8, 8)], **changes)
    name = "bulk" if "class" in reason else ""
    rejection = harness.add_all(choices(2, service_class=name))
    assert rejection is not None and rejection.reason == reason
    assert harness.scheduler.waiting_ids == ["waits"]


def test_they_displace_as_many_as_they_must() -> None:
    waiting = [make_request(f"low{index}", priority=Priority.LOW) for index in range(3)]
    harness = full_harness(waiting, queue_displacement=True)
    assert harness.add_all(choices(2)) is None
    assert harness.ends == {"low2": "displaced", "low1": "displaced"}
    assert harness.scheduler.waiting_ids == ["low0", "new#0", "new#1"]


def test_they_displace_nobody_when_one_of_them_would_be_left_over() -> None:
    waiting = [make_request("low", priority=Priority.LOW), make_request("one"), make_request("two")]
    harness = full_harness(waiting, queue_displacement=True)
    rejection = harness.add_all(choices(2))
    assert rejection is not None and rejection.reason == "queue_full_requests"
    assert not harness.ends and harness.scheduler.waiting_ids == ["low", "one", "two"]
    assert harness.add_all(choices(1)) is None and harness.ends == {"low": "displaced"}


def preemptible_harness(max_queue_requests: int) -> Harness:
    """Two slots, held by requests of low class."""
    config = make_config(max_num_seqs=2, max_queue_requests=max_queue_requests, priority_preemption=True)
    harness = Harness(config)
    harness.add(*(make_request(f"low{index}", 4, 9, priority=Priority.LOW) for index in range(2)))
    harness.step()
    return harness


def test_they_take_the_slots_of_lower_classes_where_all_have_a_place_then() -> None:
    harness = preemptible_harness(3)
    assert harness.add_all(choices(3, priority=Priority.HIGH)) is None
    assert harness.scheduler.active_ids == ["new#0", "new#1"]
    assert sorted(harness.scheduler.waiting_ids) == ["low0", "low1", "new#2"]


def test_they_take_no_slot_when_one_of_them_would_be_left_over() -> None:
    harness = preemptible_harness(2)
    assert harness.add_all(choices(3, priority=Priority.HIGH)) is not None
    assert harness.scheduler.active_ids == ["low0", "low1"] and not harness.scheduler.counters.preemptions


def test_a_lone_arrival_may_preempt_though_the_queue_has_no_place_for_itself() -> None:
    """It is larger than its victim, which the queue can hold."""
    config = make_config(max_num_seqs=1, max_queue_tokens=20, priority_preemption=True)
    harness = Harness(config)
    harness.add(make_request("low", 4, 8, priority=Priority.LOW))
    harness.step()
    assert harness.add_all([make_request("high", 20, 8, priority=Priority.HIGH)]) is None
    assert harness.scheduler.active_ids == ["high"]


def test_a_live_id_or_one_given_twice_refuses_them_all() -> None:
    harness = Harness()
    harness.add(make_request("new#1"))
    for requests in (choices(2), [make_request("a"), make_request("a")]):
        rejection = harness.add_all(requests)
        assert rejection is not None and rejection.reason == "duplicate_id"
        assert harness.scheduler.live_ids == ["new#1"]


def test_mistakes_are_named() -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(ValueError, match=r"have priorities \[0, 10\]; they must have one"):
        scheduler.add_all([make_request("a"), make_request("b", priority=Priority.LOW)], 0.0)
    with pytest.raises(ValueError, match="prompt of a has 0 tokens; it must have at least 1"):
        scheduler.add_all([Request("a", (), max_tokens=1)], 0.0)
    with pytest.raises(ValueError, match="no request is given"):
        scheduler.add_all([], 0.0)
    assert scheduler.counters.offered == 0


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_where_nobody_can_be_disturbed_they_are_taken_when_each_alone_would_be(seed: int) -> None:
    """And they get the same places."""
    rng = random.Random(seed)
    config = draw_config(rng)
    for name in ("queue_displacement", "priority_preemption"):
        object.__setattr__(config, name, False)
    harness = Harness(config, 0)
    for moment in range(rng.randint(0, 25)):
        harness.add(draw_request(rng, f"r{moment}", harness))
        if rng.random() < 0.5:
            harness.step()
    together, alone = harness.scheduler, copy.deepcopy(harness.scheduler)
    request = draw_request(rng, "new", harness)
    group = choices(rng.randint(2, 4), prompt=request.num_prompt_tokens, output=request.max_tokens)
    one_by_one = [alone.add(each, harness.now) for each in group]
    rejection = together.add_all(group, harness.now)
    assert (rejection is None) == (one_by_one == [None] * len(group))
    if rejection is None:
        assert (together.active_ids, together.waiting_ids) == (alone.active_ids, alone.waiting_ids)
    else:
        refused = [each for each in one_by_one if each is not None]
        assert rejection.reason == refused[0].reason
