"""Requests whose K/V comes from elsewhere, or goes there. Pages of 4 tokens, chunks of 8."""

from __future__ import annotations

import pytest

from jaxserve.core import SamplingParams
from jaxserve.scheduler.plan import PageMove, PageUpdate
from tests.scheduler.harness import Harness, make_config, make_request


def test_an_imported_beginning_is_filled_by_the_plan_that_places_it() -> None:
    harness = Harness()
    harness.add(make_request("a", 14, 3, num_imported_tokens=12))
    plan = harness.step()
    assert plan.imports == (PageMove("a", 0, 0, (1, 2, 3)),)
    assert plan.pages == (PageUpdate(0, 0, (1, 2, 3)), PageUpdate(0, 3, (4,)))
    (chunk,) = plan.prefill
    assert (chunk.start, len(chunk.token_ids), chunk.emits) == (12, 2, True)
    harness.run()
    assert harness.outputs["a"] == [14, 15, 16] and harness.scheduler.pages_free == 256
    assert harness.records[0]["imported"] == [["a", 3]]
    assert [key for record in harness.records[1:] for key in record if key in ("imported", "exported")] == []
    add = harness.records[0]["events"][0]
    assert (add["imports"], add["received_at"], "exports" in add) == (12, None, False)


def test_pages_are_exported_by_the_plan_that_fills_them() -> None:
    harness = Harness()
    harness.add(make_request("a", 14, 0, exports_kv=True))
    first, second = harness.step(), harness.step()
    assert first.exports == (PageMove("a", 0, 0, (1, 2)),)
    assert second.exports == (PageMove("a", 0, 2, (3,)),)
    assert (harness.ends["a"], harness.outputs["a"]) == ("length", [])
    assert harness.scheduler.pages_owned == 0
    assert [record["exported"] for record in harness.records] == [[["a", 2]], [["a", 1]]]


def test_cached_pages_are_exported_too_and_imported_ones_are_shared() -> None:
    harness = Harness(make_config(enable_prefix_caching=True))
    harness.add(make_request("a", 12, 0, exports_kv=True))
    harness.run()
    harness.add(make_request("b", 12, 0, exports_kv=True))
    plan = harness.step()
    assert [len(chunk.token_ids) for chunk in plan.prefill] == [4]
    assert plan.exports == (PageMove("b", 0, 0, (1, 2, 4)),)
    harness.add(make_request("c", 14, 3, num_imported_tokens=12))
    assert harness.step().imports == ()
    harness.run()
    other = make_request("d", 22, 3, num_imported_tokens=20)
    harness.add(other, make_request("e", 22, 3, num_imported_tokens=20))
    plan = harness.step()
    # Both come before either is computed: e's plan is the same one, so it cannot share what d imports.
    assert [(move.request_id, move.first, len(move.page_ids)) for move in plan.imports] == [("d", 3, 2), ("e", 3, 2)]
    harness.run()
    assert harness.scheduler.num_cached_tokens(other) == 20


def test_of_a_window_only_what_is_seen_comes_and_goes() -> None:
    """Under a window of 6 the token at 16 sees 11 to 16: pages 2 on."""
    config = make_config(group_windows=(0, 6))
    harness = Harness(config)
    harness.add(make_request("a", 16, 0, exports_kv=True))
    harness.run()
    assert harness.exported_pages("a") == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)}
    harness = Harness(config)
    harness.add(make_request("b", 18, 4, num_imported_tokens=16))
    plan = harness.step()
    assert plan.imports == (PageMove("b", 0, 0, (1, 2, 3, 4)), PageMove("b", 1, 2, (5, 6)))
    harness.run()
    assert harness.outputs["b"] == [18, 19, 20, 21]


@pytest.mark.parametrize("preemption", ["pause", "swap", "recompute"])
def test_who_loses_the_slot_before_its_plan_comes_back_as_it_came(preemption: str) -> None:
    config = make_config(
        max_num_seqs=1,
        priority_preemption=True,
        preemption=preemption,
        num_host_pages=20 if preemption == "swap" else 0,
    )
    harness = Harness(config)
    harness.add(make_request("low", 14, 3, priority=5, num_imported_tokens=12))
    harness.add(make_request("high", 4, 2, priority=-5))
    plan = harness.step()
    assert (plan.imports, plan.swaps, plan.preempted) == ((), (), ("low",))
    harness.run()
    assert harness.outputs == {"low": [14, 15, 16], "high": [4, 5]}
    assert sum(bool(plan.imports) for plan in harness.plans) == 1
    assert harness.scheduler.counters.recomputed_tokens == 0


def test_what_was_computed_again_is_not_exported_again() -> None:
    harness = Harness(make_config(max_num_seqs=1, priority_preemption=True, preemption="recompute"))
    harness.add(make_request("low", 24, 0, priority=5, exports_kv=True))
    harness.step()
    harness.add(make_request("high", 4, 2, priority=-5))
    harness.run()
    assert harness.exported_pages("low") == {(0, index) for index in range(6)}
    assert harness.scheduler.counters.recomputed_tokens == 8


def test_a_request_that_waits_with_imports_holds_nothing() -> None:
    harness = Harness(make_config(max_num_seqs=1, num_pages=9))
    harness.add(make_request("a", 8, 4), make_request("b", 14, 3, num_imported_tokens=12))
    harness.step()
    assert harness.scheduler.sequence("b").num_held_pages == 0 and harness.scheduler.waiting_ids == ["b"]
    harness.abort("b")
    harness.run()
    assert harness.scheduler.pages_free == 8


@pytest.mark.parametrize("imported", [13, 16, 20, -4])
def test_imports_are_whole_pages_and_less_than_the_prompt(imported: int) -> None:
    with pytest.raises(ValueError, match=f"imports {imported} of 16 prompt tokens; it must be whole pages of 4"):
        Harness().add(make_request("a", 16, num_imported_tokens=imported))


def test_a_scored_prompt_imports_nothing() -> None:
    params = SamplingParams(prompt_logprobs=0)
    with pytest.raises(ValueError, match="wants its prompt scored, so none of it can be imported"):
        Harness().add(make_request("a", 16, num_imported_tokens=4, params=params))
