"""One iteration: decode first, prompts under the budget, first and last tokens."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.scheduler.harness import Harness, make_config, make_request

CHUNK, PAGE = 8, 4


def test_a_decoding_request_gets_a_token_every_iteration_during_a_long_prompt() -> None:
    config = make_config(max_model_len=1024, max_num_batched_tokens=CHUNK + 2, prefill_chunk=CHUNK)
    harness = Harness(config)
    harness.add(make_request("a", 4, 200))
    harness.step()
    harness.add(make_request("long", 64 * CHUNK, 4), make_request("long2", 64 * CHUNK, 4))
    for iteration in range(100):
        if iteration == 30:
            harness.add(make_request("joins", 4, 40))
        plan = harness.step()
        assert plan.decode[0].request_id == "a"
        assert plan.num_tokens <= CHUNK + 2
        assert len(harness.outputs["a"]) == iteration + 2
    harness.run()
    assert harness.outputs["a"] == list(range(4, 204))


def test_prompts_share_the_budget_in_promotion_order() -> None:
    harness = Harness(make_config(max_num_batched_tokens=16, prefill_chunk=8))
    harness.add(*(make_request(name, 12) for name in "abc"))
    shares = [[(c.request_id, c.start, len(c.token_ids), c.emits) for c in harness.step().prefill] for _ in range(3)]
    assert shares[0] == [("a", 0, 8, False), ("b", 0, 8, False)]
    assert shares[1] == [("a", 8, 4, True), ("b", 8, 4, True), ("c", 0, 8, False)]
    assert shares[2] == [("c", 8, 4, True)]


def test_chunks_carry_the_prompts_own_tokens() -> None:
    harness = Harness(make_config(prefill_chunk=5))
    harness.add(make_request("a", 12))
    harness.run()
    tokens = [c.token_ids for plan in harness.plans for c in plan.prefill]
    assert list(itertools.chain.from_iterable(tokens)) == list(range(100, 112))


def test_no_more_prompts_at_once_than_allowed() -> None:
    harness = Harness(make_config(max_prefill_seqs=2))
    harness.add(*(make_request(name, 2) for name in "abcd"))
    assert [len(harness.step().prefill) for _ in range(3)] == [2, 2, 0]


def test_with_every_slot_decoding_the_budget_of_one_token_per_slot_suffices() -> None:
    harness = Harness(make_config(max_num_seqs=4, max_num_batched_tokens=4, prefill_chunk=4))
    harness.add(*(make_request(f"r{i}", 7, 9) for i in range(8)))
    harness.run()
    assert set(harness.ends.values()) == {"length"} and len(harness.ends) == 8


LENGTHS = sorted({1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1})


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chunk", [3, CHUNK, 64])
def test_lengths_around_chunk_and_page_edges_emit_exactly_their_tokens(chunk: int, lag: int) -> None:
    for prompt, output in itertools.product(LENGTHS, (1, 2, PAGE + 1)):
        harness = Harness(make_config(prefill_chunk=chunk, max_num_batched_tokens=64), lag)
        harness.add(make_request("a", prompt, output))
        harness.run()
        assert harness.outputs["a"] == list(range(prompt, prompt + output))
        assert len(harness.plans) == -(-prompt // chunk) + output - 1
        assert harness.scheduler.pages_owned == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("prompt", [1, 8, 9, 64])
def test_max_tokens_zero_computes_the_prompt_and_emits_nothing(prompt: int, lag: int) -> None:
    harness = Harness(lag=lag)
    harness.add(make_request("a", prompt, 0))
    harness.run()
    assert harness.outputs["a"] == [] and harness.ends["a"] == "length"
    assert sum(len(c.token_ids) for plan in harness.plans for c in plan.prefill) == prompt
    assert not any(c.emits for plan in harness.plans for c in plan.prefill)
    (event,) = harness.events
    assert (event.token_id, event.source, event.finish_reason) == (None, "prefill", "length")


def test_every_promotion_is_announced_once() -> None:
    harness = Harness(make_config(max_num_seqs=2))
    harness.add(*(make_request(f"r{i}") for i in range(6)))
    harness.run()
    placed = [(p.request_id, p.num_output_tokens, p.last_token_id) for plan in harness.plans for p in plan.placements]
    assert placed == [(f"r{i}", 0, -1) for i in range(6)]


def test_a_slot_left_before_the_next_plan_is_not_announced() -> None:
    harness = Harness()
    harness.add(make_request("a"), make_request("b"))
    harness.abort("a")
    assert [p.request_id for p in harness.step().placements] == ["b"]


def test_pages_are_taken_as_tokens_need_them() -> None:
    harness = Harness(make_config(prefill_chunk=8))
    harness.add(make_request("a", 10, 8))
    owned = []
    while not harness.scheduler.idle:
        harness.step()
        owned.append(harness.scheduler.pages_owned)
    assert owned == [2, 3, 3, 3, 4, 4, 4, 4, 0]


def test_nothing_to_do_is_an_empty_plan_that_counts_for_nothing() -> None:
    harness = Harness()
    assert harness.step().empty and harness.step().iteration == 0
    assert harness.scheduler.idle and harness.scheduler.num_plans == 0


def test_work_of_an_iteration_does_not_grow_with_the_queue() -> None:
    def calls_of_a_step(num_waiting: int) -> int:
        harness = Harness(make_config(max_num_seqs=2, max_queue_requests=10_000, max_model_len=64), lag=1)
        scheduler = harness.scheduler
        for index in range(num_waiting + 2):
            assert scheduler.add(make_request(f"r{index}", 4, 40), 0.0) is None
        scheduler.schedule(0.0)
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        previous = sys.getprofile()
        sys.setprofile(profile)
        try:
            scheduler.schedule(1.0)
            scheduler.abort(f"r{num_waiting // 2 + 2}", 1.0)
        finally:
            sys.setprofile(previous)
        return count

    assert calls_of_a_step(5_000) <= calls_of_a_step(10) + 5
