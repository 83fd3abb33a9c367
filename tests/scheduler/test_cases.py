"""Faults that users of other engines reported, as they would show in a scheduler. Time is iterations."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxserve.config.policy_config import GROWING_RESERVATIONS, POLICIES, RESERVATIONS
from jaxserve.core import Priority
from tests.scheduler.harness import PAGES, STOP_ID, Harness, make_config, make_request, stopping_request


def first_step(harness: Harness, request_id: str) -> int:
    """Number of the iteration that first carried a row of a request."""
    return next(
        plan.iteration
        for plan in harness.plans
        if any(row.request_id == request_id for row in (*plan.decode, *plan.prefill))
    )


@pytest.mark.parametrize("preemption", ["pause", "recompute"])
def test_an_urgent_request_starts_in_the_next_step_although_the_slots_are_full(preemption: str) -> None:
    """SCH-1."""
    settings = {"max_num_seqs": 2, "max_model_len": 256, "priority_preemption": True, "preemption": preemption}
    harness = Harness(make_config(**settings))
    harness.add(*(make_request(name, 4, 200, priority=Priority.LOW) for name in "ab"))
    for _ in range(5):
        harness.step()
    harness.add(make_request("urgent", 4, 4, priority=Priority.HIGH))
    harness.run()
    assert first_step(harness, "urgent") == 5
    assert harness.scheduler.counters.preemptions == 1
    assert harness.outputs["a"] == harness.outputs["b"] == list(range(4, 204))


def test_equal_priorities_preempt_nobody() -> None:
    """SCH-1."""
    harness = Harness(make_config(max_num_seqs=2, max_model_len=256, priority_preemption=True))
    harness.add(make_request("a", 4, 200), make_request("b", 4, 200))
    for _ in range(5):
        harness.step()
    harness.add(make_request("c", 4, 4))
    harness.run()
    assert harness.scheduler.counters.preemptions == 0
    assert first_step(harness, "c") >= 199, "it waits until a slot is free"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_preemption_of_slots_an_urgent_request_has_the_first_that_is_free_under_priority(policy: str) -> None:
    """SCH-1: ahead of all who wait, however long they have; under `fcfs` nobody is ahead."""
    harness = Harness(make_config(max_num_seqs=2, max_model_len=256, policy=policy, max_queue_requests=20))
    harness.add(*(make_request(name, 4, 20 + i, priority=Priority.LOW) for i, name in enumerate("ab")))
    harness.step()
    harness.add(*(make_request(f"low{i}", 4, 10, priority=Priority.LOW) for i in range(6)))
    for _ in range(4):
        harness.step()
    harness.add(make_request("urgent", 4, 4, priority=Priority.HIGH))
    freed = None
    while "urgent" not in harness.scheduler.active_ids:
        if "a" in harness.ends and freed is None:
            freed = harness.scheduler.num_plans
        harness.step()
    waiting_at_first_slot = {f"low{i}" for i in range(6)} & set(harness.scheduler.waiting_ids)
    assert harness.scheduler.counters.preemptions == 0
    assert len(waiting_at_first_slot) == (6 if policy == "priority" else 0)
    if policy == "priority":
        assert first_step(harness, "urgent") == freed
    harness.run()
    assert set(harness.ends.values()) == {"length"}


@pytest.mark.parametrize(("reservation", "preemption"), PAGES)
def test_an_urgent_request_without_pages_evicts_nobody(reservation: str, preemption: str) -> None:
    """SCH-1: what the lowest one would give up is not enough; under pause its pages stay, so that is nothing."""
    policies = {"preemption": preemption, "reservation": reservation, "priority_preemption": True}
    host = {"num_host_pages": 20} if preemption in ("swap", "auto") else {}
    harness = Harness(make_config(max_num_seqs=2, num_pages=11, max_model_len=40, **policies, **host))
    # Of ten pages "high" holds five to its end, as urgent as who comes; "low" holds three at most.
    harness.add(make_request("high", 17, 3, priority=Priority.HIGH), make_request("low", 4, 8, priority=Priority.LOW))
    harness.step()
    harness.add(make_request("urgent", 32, 4, priority=Priority.HIGH))
    before = dict(harness.outputs)
    harness.step()
    assert harness.scheduler.counters.preemptions == 0 and harness.scheduler.waiting_ids == ["urgent"]
    assert set(harness.scheduler.active_ids) == set(before) - {"urgent"}
    harness.run()
    assert set(harness.ends.values()) == {"length"} and harness.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reservation", sorted(GROWING_RESERVATIONS))
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_no_two_of_equal_priority_change_places_twice(policy: str, reservation: str, preemption: str) -> None:
    """SCH-1: one preempted while the other ran, then the other while the first ran, and again."""
    harness = Harness(
        make_config(
            max_num_seqs=3,
            num_pages=13,
            max_queue_requests=20,
            priority_preemption=True,
            policy=policy,
            reservation=reservation,
            preemption=preemption,
            num_host_pages=12 if preemption != "recompute" else 0,
        )
    )
    harness.add(*(make_request(f"r{i}", 3 + i, 20 + 5 * (i % 4)) for i in range(10)))
    lost_to: Counter[tuple[str, str]] = Counter()
    while not harness.scheduler.idle:
        plan = harness.step()
        for victim in plan.preempted:
            lost_to.update((victim, other) for other in harness.scheduler.active_ids)
    assert harness.scheduler.counters.preemptions > 0 or reservation == "expected"
    swaps = {tuple(sorted(pair)): min(count, lost_to[pair[::-1]]) for pair, count in lost_to.items()}
    assert all(count <= 1 for count in swaps.values()), swaps
    assert set(harness.ends.values()) == {"length"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reservation", ["guaranteed", "optimistic"])
def test_a_big_or_lowly_request_starts_among_endless_small_ones(policy: str, reservation: str) -> None:
    """SCH-3: the pool of 32 pages is kept full by requests of a page; one needs 20, one has least priority."""
    harness = Harness(
        make_config(
            max_num_seqs=40,
            max_num_batched_tokens=80,
            max_prefill_seqs=40,
            num_pages=33,
            max_model_len=128,
            max_queue_requests=60,
            policy=policy,
            reservation=reservation,
            preemption="recompute",
            priority_aging_s=1.0,
            sjf_aging_tokens_per_s=2.0,
        )
    )

    def arrivals(moment: int) -> None:
        while harness.scheduler.num_waiting < 20:
            harness.add(make_request(f"s{moment}-{harness.scheduler.counters.offered}", 2, 2, tenant="small"))

    for moment in range(20):
        arrivals(moment)
        harness.step()
    harness.add(make_request("big", 40, 40, tenant="big"))
    harness.add(make_request("lowly", 2, 2, priority=50, tenant="big"))
    for moment in range(20, 320):
        arrivals(moment)
        harness.step()
    started = {name: first_step(harness, name) for name in ("big", "lowly")}
    # Aging outweighs 80 tokens of work after 40 iterations, 50 points of priority after 50.
    assert all(step - 20 <= 70 for step in started.values()), started
    assert harness.scheduler.counters.completed > 300, "the small ones went on"


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_requests_that_each_need_most_of_the_pool_all_finish(reservation: str) -> None:
    """PRE-3: no iteration without a token, and few preemptions."""
    harness = Harness(
        make_config(
            num_pages=21,
            max_model_len=80,
            max_queue_requests=20,
            reservation=reservation,
            preemption="recompute",
            max_preemptions=2,
        )
    )
    harness.add(*(make_request(f"r{i}", 8, 56) for i in range(20)))
    while not harness.scheduler.idle:
        assert harness.step().num_tokens > 0
    assert set(harness.ends.values()) == {"length"} and len(harness.ends) == 20
    assert harness.scheduler.counters.preemptions <= 2 * 20


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_fifty_pools_of_prompts_leave_every_page_where_it_belongs(concurrent: bool, reservation: str) -> None:
    """PFX-8: distinct prompts, every way to end, pages counted to the last."""
    rng = random.Random(5)
    harness = Harness(
        make_config(
            num_pages=33,
            max_queue_requests=100,
            enable_prefix_caching=True,
            reservation=reservation,
            preemption="recompute",
        ),
        sample=lambda request_id, position: STOP_ID if position == 30 else position,
    )
    served_pages = count = 0
    while served_pages < 50 * 32:
        name, length = f"r{count}", rng.randint(9, 40)
        request = stopping_request(name, length, 12) if count % 3 else make_request(name, length, 12)
        salt = str(count)  # as good as a distinct prompt
        fields = {"cache_salt": salt, "deadline_at": harness.now + 3 if count % 7 == 0 else None}
        harness.add(type(request)(**{f: getattr(request, f) for f in request.__slots__} | fields))
        if count % 5 == 0:
            harness.step()
            harness.abort(name)
        served_pages += -(-(length + 12) // 4)
        count += 1
        if not concurrent:
            harness.run()
        else:
            harness.step()
    harness.run()
    scheduler = harness.scheduler
    assert set(harness.ends.values()) == {"length", "stop", "abort", "expired"}
    assert scheduler.pages_owned == 0 and scheduler.pages_free + scheduler.pages_cached == 32
    scheduler.reset_prefix_cache(harness.now)
    assert sorted(scheduler._pages._free) == list(range(1, 33))
