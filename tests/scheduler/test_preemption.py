"""What a victim gives up: pages to the host and back, what decides between that and computing again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.scheduler import Scheduler, StepPlan, StepResult
from jaxserve.scheduler.plan import PageSwap
from tests.scheduler.harness import Harness, make_config, make_request


def two_for_five_pages(**settings: object) -> Harness:
    """Two requests that grow to 3 pages each, on 5: "b" gives way and comes back when "a" has ended."""
    config = dict(num_pages=6, reservation="optimistic", preemption="swap", num_host_pages=8, max_num_seqs=2)
    harness = Harness(make_config(**(config | settings)))
    harness.add(make_request("a", 5, 7), make_request("b", 5, 8))
    harness.run()
    assert harness.ends == {"a": "length", "b": "length"}
    return harness


def swaps(plans: Iterable[StepPlan]) -> list[PageSwap]:
    return [swap for plan in plans for swap in plan.swaps]


def test_pages_go_out_in_the_iteration_of_the_preemption_and_come_back_once() -> None:
    harness = two_for_five_pages()
    # "a" holds pages 1 and 2 and "b" 3 and 4 when both need a third; later 1 and 2 are the lowest free ones.
    assert swaps(harness.plans) == [PageSwap("b", True, (3, 4), (0, 1)), PageSwap("b", False, (1, 2), (0, 1))]
    (preemption,) = [plan for plan in harness.plans if plan.preempted]
    assert preemption.swaps and preemption.preempted == ("b",)
    assert harness.scheduler.counters.recomputed_tokens == 0
    prompt_tokens = sum(len(chunk.token_ids) for plan in harness.plans for chunk in plan.prefill)
    assert prompt_tokens == 10, "nothing is computed twice"


def test_the_trace_tells_of_swaps() -> None:
    records = two_for_five_pages().records
    out = [record for record in records if record.get("swapped_out")]
    back = [record for record in records if record.get("swapped_in")]
    assert [record["swapped_out"] for record in out] == [[["b", 2]]] == [record["swapped_in"] for record in back]
    assert (out[0]["host_pages_free"], back[0]["host_pages_free"]) == (6, 8)
    assert out[0]["preempted"] == ["b"]


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    harness = two_for_five_pages(enable_prefix_caching=True)
    out, *back = swaps(harness.plans)
    copied = sum(len(swap.page_ids) for swap in back)
    assert out.out and copied < len(out.page_ids)


def test_without_room_on_the_host_it_is_computed_again() -> None:
    harness = two_for_five_pages(num_host_pages=1)
    assert swaps(harness.plans) == []
    assert harness.scheduler.counters.recomputed_tokens == 8


def test_one_that_ends_on_the_host_gives_its_host_pages_back() -> None:
    harness = Harness(
        make_config(num_pages=6, reservation="optimistic", preemption="swap", num_host_pages=8, max_num_seqs=2)
    )
    harness.add(make_request("a", 5, 7), make_request("b", 5, 8))
    for _ in range(6):
        harness.step()
    assert harness.scheduler.host_pages_free == 6
    harness.abort("b")
    assert harness.scheduler.host_pages_free == 8


def test_costs_are_counted_by_service_class() -> None:
    classes = (ServiceClass("bulk"), ServiceClass("chat"))
    for preemption, host_pages in (("swap", 8), ("recompute", 0)):
        harness = Harness(
            make_config(
                num_pages=6,
                reservation="optimistic",
                preemption=preemption,
                num_host_pages=host_pages,
                max_num_seqs=2,
                service_classes=classes,
            )
        )
        harness.add(make_request("a", 5, 7, service_class="chat"), make_request("b", 5, 8, service_class="bulk"))
        harness.run()
        counters = harness.scheduler.counters
        costs = (counters.swapped_pages_of, counters.recomputed_tokens_of)
        assert costs == (({"bulk": 4}, {}) if preemption == "swap" else ({}, {"bulk": 8}))


class Timed:
    """Runs a scheduler whose iterations take what the test says a token and a copied page take."""

    def __init__(self, config: SchedulerConfig, *, prompt_token_s: float, page_s: float) -> None:
        self.scheduler = Scheduler(config)
        self.plans: list[StepPlan] = []
        self._prompt_token_s, self._page_s = prompt_token_s, page_s
        self._now = 0.0

    def run(self, num_requests: int) -> None:
        """Pairs of requests of which one must give way."""
        for index in range(num_requests):
            self.scheduler.add(make_request(f"r{index}", 5, 7 + index % 2), self._now)
        while not self.scheduler.idle:
            plan = self.scheduler.schedule(self._now)
            self.plans.append(plan)
            num_prefill = plan.num_tokens - len(plan.decode)
            num_swapped = sum(len(swap.page_ids) for swap in plan.swaps)
            self._now += 1.0 + self._prompt_token_s * num_prefill + self._page_s * num_swapped
            self.scheduler.update(plan, StepResult((1,) * len(plan.decode), (1,) * len(plan.prefill)), self._now)


@pytest.mark.parametrize(
    ("prompt_token_s", "page_s", "wins"),
    # 8 tokens are lost or 2 pages are copied twice: 8 x 1 against 4 x 0.1, and 8 x 0.01 against 4 x 1.
    [(1.0, 0.1, "swap"), (0.01, 1.0, "recompute")],
)
def test_auto_takes_what_measured_cheaper(prompt_token_s: float, page_s: float, wins: str) -> None:
    config = make_config(
        num_pages=6,
        reservation="optimistic",
        preemption="auto",
        num_host_pages=8,
        max_num_seqs=2,
        max_queue_requests=100,
    )
    timed = Timed(config, prompt_token_s=prompt_token_s, page_s=page_s)
    timed.run(80)
    counters = timed.scheduler.counters
    swapped = len([swap for swap in swaps(timed.plans) if swap.out])
    recomputed = counters.preemptions - swapped
    assert counters.preemptions >= 20
    if wins == "swap":
        assert recomputed == 0
    else:
        # The first tells the price, and once in a while it is asked again.
        assert 1 <= swapped <= 0.2 * counters.preemptions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption": "swap"}, "num_host_pages is 0 and preemption is 'swap'; it must be at least 1"),
        ({"preemption": "auto"}, "num_host_pages is 0 and preemption is 'auto'; it must be at least 1"),
        ({"num_host_pages": 3}, "num_host_pages is 3 and preemption is 'pause'; it must be .* and 0 without"),
        ({"num_host_pages": -1}, "num_host_pages is -1"),
    ],
)
def test_a_host_pool_and_swapping_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**settings)
