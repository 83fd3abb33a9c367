"""Each policy does what `docs/scheduling.md` says of it; answers that can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config import ServiceClass
from jaxserve.core import Priority, Request
from jaxserve.scheduler.length_estimator import LengthEstimator
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.peak import peak_of_additional_pages
from jaxserve.scheduler.prompt_choice import PromptChoice
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.step_time import StepTimeModel, attended_pairs
from tests.scheduler.harness import Harness, make_config, make_request


def order_of(harness: Harness) -> list[str]:
    """Ids in the order in which they first ran."""
    seen: dict[str, None] = {}
    for plan in harness.plans:
        seen |= dict.fromkeys(placement.request_id for placement in plan.placements)
    return list(seen)


def run_behind_a_blocker(requests: list[Request], **settings: object) -> list[str]:
    """One slot, held while `requests` arrive a step apart; the order in which they then run."""
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=50, **settings))
    harness.add(make_request("blocker", 2, 40))
    for request in requests:
        harness.step()
        harness.add(request)
    harness.run()
    return order_of(harness)[1:]


def test_priority_goes_by_class_until_waiting_outweighs_it() -> None:
    requests = [make_request("low", priority=2), make_request("high", priority=-2), make_request("later", priority=1)]
    assert run_behind_a_blocker(requests, policy="priority", priority_aging_s=10.0) == ["high", "later", "low"]
    # A point is worth a tenth of a step: arrival decides.
    assert run_behind_a_blocker(requests, policy="priority", priority_aging_s=0.1) == ["low", "high", "later"]


def test_sjf_goes_by_work_until_waiting_outweighs_it() -> None:
    requests = [make_request("long", 4, 40), make_request("short", 4, 4), make_request("middle", 4, 20)]
    assert run_behind_a_blocker(requests, policy="sjf", sjf_aging_tokens_per_s=1.0) == ["short", "middle", "long"]
    assert run_behind_a_blocker(requests, policy="sjf", sjf_aging_tokens_per_s=100.0) == ["long", "short", "middle"]


def test_edf_goes_by_deadline_and_gives_the_others_one() -> None:
    requests = [make_request("none"), make_request("late", deadline_at=500.0), make_request("soon", deadline_at=300.0)]
    assert run_behind_a_blocker(requests, policy="edf", edf_default_s=400.0) == ["soon", "none", "late"]


def test_fair_alternates_between_tenants_by_what_they_were_given() -> None:
    many = [make_request(f"a{i}", 4, 4, tenant="a") for i in range(4)]
    few = [make_request(f"b{i}", 4, 4, tenant="b") for i in range(2)]
    order = run_behind_a_blocker([*many, *few], policy="fair")
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_fair_counts_a_prompt_once_and_outputs_twice() -> None:
    harness = Harness(make_config(policy="fair", prefill_chunk=3))
    harness.add(make_request("x", 7, 5, tenant="t"))
    counters = harness.scheduler._order.counters
    assert counters is not None
    for expected in (3, 6, 9, 11, 13, 15):  # chunks 3, 3, 1 and a token, then a token each
        harness.step()
        assert counters["t"] == expected
    harness.run()
    assert counters["t"] == 7 * 1 + 5 * 2


def test_a_tenant_that_returns_is_lifted_to_the_others() -> None:
    harness = Harness(make_config(policy="fair", max_num_seqs=1))
    counters = harness.scheduler._order.counters
    assert counters is not None
    for index in range(5):
        harness.add(make_request(f"a{index}", 4, 4, tenant="a"))
        harness.run()
    harness.add(make_request("a5", 4, 4, tenant="a"), make_request("b0", 4, 4, tenant="b"))
    assert counters["b"] == counters["a"] > 0


def test_a_class_at_its_slot_limit_is_passed_over() -> None:
    classes = (ServiceClass("bulk", max_slots=1),)
    harness = Harness(make_config(max_num_seqs=2, service_classes=classes))
    harness.add(*(make_request(f"bulk{i}", service_class="bulk") for i in range(3)), make_request("plain"))
    assert harness.scheduler.active_ids == ["bulk0", "plain"]
    harness.run()
    assert order_of(harness) == ["bulk0", "plain", "bulk1", "bulk2"]


def test_displacement_ends_the_latest_of_the_lowest_class_and_only_that() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=2, queue_displacement=True))
    harness.add(make_request("runs"), make_request("low0", priority=Priority.LOW))
    harness.add(make_request("low1", priority=Priority.LOW))
    (equal,) = harness.add(make_request("equal", priority=Priority.LOW))
    assert equal is not None and equal.reason == "queue_full_requests"
    assert harness.add(make_request("high", priority=Priority.HIGH)) == [None]
    assert harness.ends == {"low1": "displaced"}
    assert harness.scheduler.counters.rejected == {"queue_full_requests": 1, "displaced": 1}


@pytest.mark.parametrize(("victim", "hit"), [("most_remaining", "long"), ("least_computed", "young")])
def test_the_victim_of_the_lowest_class_is_chosen_by_rule(victim: str, hit: str) -> None:
    harness = Harness(make_config(max_num_seqs=3, priority_preemption=True, victim=victim))
    harness.add(make_request("long", 4, 40, priority=5), make_request("middle", 4, 20, priority=1))
    for _ in range(6):
        harness.step()
    harness.add(make_request("young", 4, 8, priority=5))
    harness.step()
    harness.add(make_request("urgent", priority=-5))
    assert harness.step().preempted == (hit,)


def test_one_preempted_often_enough_is_left_alone() -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True, max_preemptions=2, max_queue_requests=9))
    harness.add(make_request("victim", 4, 40, priority=9))
    for index in range(4):
        harness.step()
        harness.step()
        harness.add(make_request(f"urgent{index}", 2, 1))
        harness.step()
        harness.step()
    assert harness.scheduler.sequence("victim").num_preemptions == 2
    harness.run()


def test_exact_admits_what_the_sum_of_maxima_would_refuse() -> None:
    """17 pages of 4 tokens: maxima of 10, 7 and 3, but the first ends long before the second is at its longest."""

    def running(reservation: str) -> int:
        harness = Harness(make_config(num_pages=18, reservation=reservation))
        harness.add(make_request("old", 4, 36))
        for _ in range(30):
            harness.step()
        harness.add(make_request("young", 4, 24))
        harness.step()
        harness.step()
        harness.add(make_request("new", 4, 8))
        found = harness.scheduler.num_running
        harness.run()
        return found

    assert (running("guaranteed"), running("exact")) == (2, 3)


def test_peak_is_what_stepping_through_finds() -> None:
    size = 4
    config, pages = make_config(page_size=size), PageAllocator(100)
    sequences = []
    for index, (scheduled, left) in enumerate([(5, 9), (8, 2), (3, 14), (12, 5)]):
        sequence = Sequence(make_request(f"r{index}", scheduled, left + 1), index, 0.0, num_scheduled=scheduled)
        sequence.holdings[0].pages = pages.allocate(-(-scheduled // size))
        sequences.append(sequence)
    held = sum(sequence.num_held_pages for sequence in sequences)
    peak = 0
    for step in range(1, 15):
        alive = [s for s in sequences if s.num_scheduled + step <= s.num_kv_tokens]
        peak = max(peak, sum(-(-(s.num_scheduled + step) // size) for s in alive) - held)
    assert peak_of_additional_pages(sequences, frozenset(), pages, config) == peak > 0


def test_expected_lengths_are_quantiles_of_the_longer_ones() -> None:
    lengths = LengthEstimator()
    assert lengths.expected(0.5, 0, 100) == 100, "nothing is known"
    for length in (10, 20, 30, 40):
        lengths.observe(length)
    assert lengths.expected(0.5, 0, 100) == 30
    assert lengths.expected(0.5, 25, 100) == 40
    assert lengths.expected(0.5, 40, 100) == 100
    assert lengths.expected(0.5, 0, 15) == 15
    for _ in range(lengths.WINDOW):
        lengths.observe(7)
    assert lengths.expected(1.0, 0, 100) == 7, "old lengths are forgotten"


def test_step_time_is_learned_and_leaves_prompts_what_the_target_allows() -> None:
    model = StepTimeModel()
    assert model.left_s(0.05, 4) is None and model.prefill_s(10) is None and model.decode_s(4) is None
    for step in range(200):
        decode, prefill, start = step % 9, (step * 37) % 128, (step * 91) % 2000
        pairs = attended_pairs(start, prefill)
        model.observe(decode, prefill, 0.010 + 0.001 * decode + 0.0002 * prefill + 0.0003 * pairs, pairs=pairs)
    assert model.decode_s(4) == pytest.approx(0.014, rel=0.01)
    left_s = model.left_s(0.05, 4)
    assert left_s == pytest.approx(0.036, rel=0.01)
    assert model.chunk_within(left_s, 0, 500) == (pytest.approx(161, abs=2), pytest.approx(left_s, rel=0.02))
    assert model.chunk_within(left_s, 2000, 500) == (pytest.approx(44, abs=1), pytest.approx(left_s, rel=0.03))
    assert model.chunk_within(left_s, 2000, 10) == (10, pytest.approx(10 * (0.0002 + 0.0003 * 2.005), rel=0.01))
    assert model.chunk_within(-0.001, 0, 500) == (0, 0.0)
    assert model.prefill_s(1000) == pytest.approx(1000 * 0.0002 + 0.0003 * attended_pairs(0, 1000), rel=0.01)


def test_a_target_holds_far_into_a_long_prompt() -> None:
    """A prompt token costs more the more it attends to: chunks shrink as the prompt goes on, and steps stay as long."""
    harness = Harness(
        make_config(
            max_num_batched_tokens=256,
            prefill_chunk=256,
            page_size=4,
            max_model_len=3000,
            num_pages=3000,
            itl_target_s=0.02,
        )
    )
    scheduler, now, took = harness.scheduler, 0.0, []
    scheduler.add(make_request("decodes", 4, 2500), now)
    for index in range(400):
        if index % 200 == 10:
            scheduler.add(make_request(f"long{index}", 2000, 1), now)
        plan = scheduler.schedule(now)
        result = harness._device.run(plan, harness._content)
        pairs = sum(attended_pairs(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill)
        seconds = 0.01 + 1e-4 * plan.num_prefill_tokens + 3e-4 * pairs
        if plan.decode and plan.prefill:
            took.append((index, seconds, plan.num_prefill_tokens))
        now += seconds
        scheduler.update(plan, result, now)
    second = [each for each in took if each[0] >= 210]
    assert sum(tokens for _, _, tokens in second) == 2000
    assert max(seconds for _, seconds, _ in second) < 0.022
    chunks = [tokens for *_, tokens in second]
    assert chunks[0] > 2 * chunks[-2], f"chunks {chunks}"


def mixed_step_tokens(
    class_of: Callable[[int], str] = lambda index: "", *, num_steps: int = 30, **settings: Any
) -> list[int]:
    """Tokens of each step with decode rows and prompts; a request comes in each, and is refused if too many wait.

    A step takes as many seconds as it has tokens; the harness's clock counts steps, so the scheduler is fed here.

    Args:
      class_of: service class of the request of a number.
    """
    limits = {"max_num_batched_tokens": 16, "prefill_chunk": 16, "max_model_len": 200}
    harness = Harness(make_config(**limits, **settings))
    scheduler, now = harness.scheduler, 0.0
    tokens = []
    for index in range(num_steps):
        scheduler.add(make_request(f"r{index}", 30, 3, service_class=class_of(index)), now)
        plan = scheduler.schedule(now)
        result = harness._device.run(plan, harness._content)
        if plan.decode and plan.prefill:
            tokens.append(plan.num_tokens)
        now += plan.num_tokens
        scheduler.update(plan, result, now)
        scheduler.check_invariants()
    return tokens


def test_an_itl_target_shortens_chunks_beside_decode_rows() -> None:
    tokens = mixed_step_tokens(itl_target_s=6.0)
    assert max(tokens[:3]) > 6 and max(tokens[-8:]) <= 7


@pytest.mark.parametrize(
    ("targets", "of_engine", "longest"),
    [
        ({"quick": 6.0}, None, 7),
        ({"quick": 6.0}, 12.0, 7),
        ({"quick": 12.0}, 6.0, 7),
        ({"quick": 12.0, "other": 6.0}, None, 13),  # nobody of the other class is there
        ({"other": 6.0}, None, 16),
        ({"quick": None}, None, 16),
    ],
)
def test_the_smallest_target_of_the_classes_that_decode_holds(
    targets: dict[str, float | None], of_engine: float | None, longest: int
) -> None:
    classes = tuple(ServiceClass(name, itl_target_s=target) for name, target in {"quick": None, **targets}.items())
    tokens = mixed_step_tokens(lambda index: "quick", itl_target_s=of_engine, service_classes=classes)
    # The model has settled; a page's worth of prompt, 4 tokens, may stand over.
    assert longest - 3 <= max(tokens[-8:]) <= longest


def test_a_class_target_holds_only_while_the_class_decodes() -> None:
    """Two requests of it come when the model has settled; before and after them prompts get their whole chunks."""
    classes = (ServiceClass("quick", itl_target_s=6.0),)
    tokens = mixed_step_tokens(lambda index: "quick" if 7 < index < 10 else "", num_steps=60, service_classes=classes)
    held = [index for index, count in enumerate(tokens) if count <= 7]
    assert held and set(tokens[: held[0]]) == {16}
    assert len(tokens[held[-1] + 1 :]) > 10 and set(tokens[held[-1] + 1 :]) == {16}


def test_a_class_target_does_not_hold_for_the_class_s_own_prompts() -> None:
    """The quick ones are computing their prompts; who decodes has no target."""
    choice = PromptChoice(
        make_config(service_classes=(ServiceClass("quick", itl_target_s=6.0),)), settled_model(), {"quick": 1}
    )
    quick = Sequence(make_request("q", 30, service_class="quick"), 0, 0.0)
    assert choice.choose([quick], num_decode=2, budget=16) == [(quick, 8)]
    plain = Sequence(make_request("p", 30), 1, 0.0)
    assert choice.choose([plain], num_decode=2, budget=16) == [(plain, 4)]


def settled_model() -> StepTimeModel:
    """Has learned that a step takes a second per token."""
    model = StepTimeModel()
    for step in range(200):
        model.observe(step % 5, step % 17, float(step % 5 + step % 17))
    return model


def test_only_so_many_long_prompts_at_once_and_short_ones_pass() -> None:
    harness = Harness(
        make_config(long_prefill_token_threshold=10, max_long_prefills=1, prefill_chunk=5, max_num_batched_tokens=16)
    )
    harness.add(make_request("long0", 40), make_request("long1", 40), make_request("short", 8))
    assert [chunk.request_id for chunk in harness.step().prefill] == ["long0", "short"]
    harness.run()


@pytest.mark.parametrize("batching", ["static", "request_dynamic"])
def test_older_schemes_keep_a_batch_until_its_longest_ends(batching: str) -> None:
    harness = Harness(make_config(max_num_seqs=2, batching=batching, batch_timeout_s=3.0))
    harness.add(make_request("short", 2, 2), make_request("long", 2, 9), make_request("next", 2, 2))
    harness.run()
    starts = {p.request_id: plan.iteration for plan in harness.plans for p in plan.placements}
    assert starts["short"] == starts["long"] == 0
    last_of_long = max(plan.iteration for plan in harness.plans if any(r.request_id == "long" for r in plan.decode))
    assert starts["next"] == last_of_long + 1


def test_request_dynamic_waits_for_company_but_not_for_ever() -> None:
    harness = Harness(make_config(max_num_seqs=2, batching="request_dynamic", batch_timeout_s=3.0))
    harness.add(make_request("alone"))
    assert [harness.step().empty for _ in range(4)] == [True, True, True, False]


def test_what_waits_for_company_says_so_while_nothing_runs() -> None:
    harness = Harness(make_config(max_num_seqs=2, batching="request_dynamic", batch_timeout_s=3.0))
    scheduler = harness.scheduler

    def gathers(after_s: float = 0.0) -> bool:
        return scheduler.gathers(harness.now + after_s)

    assert not gathers()
    harness.add(make_request("first", 2, 4))
    assert gathers() and gathers(2.9) and not gathers(3.0)
    harness.add(make_request("second", 2, 4))
    assert not gathers()
    harness.step()
    harness.add(make_request("third", 2, 2))
    assert not gathers(), "it waits for those that run"
    harness.run()
    assert not gathers()


def test_a_deadline_that_cannot_be_met_is_refused_with_a_time() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=50, prefill_chunk=4))
    for index in range(9):  # each takes 8 steps: two chunks, then tokens
        harness.add(make_request(f"r{index}", 8, 7))
        harness.run()
    harness.add(make_request("running", 8, 7), *(make_request(f"queued{i}", 8, 7) for i in range(5)))
    (refusal,) = harness.add(make_request("hasty", 8, 7, deadline_at=harness.now + 20))
    assert refusal is not None and refusal.reason == "deadline_infeasible"
    assert refusal.retry_after_s == pytest.approx(6 * 8 + 2, rel=0.2)
    assert harness.add(make_request("patient", 8, 7, deadline_at=harness.now + 100)) == [None]
    (unmeetable,) = harness.add(make_request("instant", 8, 7, deadline_at=harness.now + 0.5))
    assert unmeetable is not None and unmeetable.reason == "deadline_infeasible"
