"""Faults that users of other simulators reported, as they would show here."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import GROWING_RESERVATIONS, POLICIES, RESERVATIONS
from jaxserve.sim.cost_model import StepFeatures
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.simulator import ALL_TERMINAL, ITERATION_LIMIT, SimulationResult, Simulator
from jaxserve.sim.source import Arrival, Source, make_request, prompt_of
from jaxserve.sim.workload import DrawnWorkload, parse_workload

LONGEST = 24 + 20
PAGE_SIZE = 4
PAGES_OF_LONGEST = LONGEST // PAGE_SIZE


class CountedSource:
    """A source that counts what it hands out."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.num_injected = 0
        self.peek, self.ended = source.peek, source.ended

    def take(self) -> Arrival:
        self.num_injected += 1
        return self._source.take()


class Conservation:
    """A cost model that looks at the whole simulation in every iteration; an iteration takes a second.

    Attributes:
      simulation: to be set before it runs.
      num_iterations: in which it looked.
    """

    def __init__(self, source: CountedSource) -> None:
        self.simulation: Simulator | None = None
        self.source = source
        self.num_iterations = 0

    def step_s(self, features: StepFeatures) -> float:
        assert self.simulation is not None
        scheduler, config = self.simulation.scheduler, self.simulation.scheduler.config
        self.num_iterations += 1
        assert 0 < features.decode_rows + features.prefill_tokens <= config.max_num_batched_tokens
        used = scheduler.pages_owned + scheduler.pages_cached
        assert used + scheduler.pages_free == config.num_pages - 1  # page 0 is nobody's
        # What the scheduler has and what the log says has ended were counted apart.
        ended = sum(outcome != 0 for outcome in self.simulation._result.log.outcome)
        assert self.source.num_injected == ended + scheduler.num_waiting + scheduler.num_running
        return 1.0

    def explain(self, features: StepFeatures) -> list[str]:
        return []


def draw_workload(rng: random.Random, num_requests: int) -> DrawnWorkload:
    """Requests that come too fast, about as they can be served or slowly; half of them with a deadline."""
    rate = rng.choice([0.05, 0.3, 3.0])
    arrivals: dict[str, Any] = rng.choice(
        [
            {"kind": "poisson", "rate": rate},
            {"kind": "gamma", "rate": rate, "cv": 3.0},
            {"kind": "batch"},
            {"kind": "closed_loop", "concurrency": rng.randint(1, 12), "think_s": rng.choice([0.0, 2.0])},
        ]
    )
    common = {
        "prompt": {"kind": "uniform", "low": 1, "high": 24},
        "output": {"kind": "uniform", "low": 1, "high": 20},
        "max_tokens": {"kind": "uniform", "low": 1, "high": 20},
    }
    classes = [
        {"name": "patient", "priority": "low", "tenant": "a"},
        {"name": "hasty", "priority": "high", "tenant": "b", "deadline_s": rng.choice([3.0, 20.0])},
    ]
    document = {"num_requests": num_requests, "seed": rng.randrange(1000), "arrivals": arrivals, "classes": classes}
    return parse_workload(document | common, "random")


def draw_config(rng: random.Random, num_pages: int) -> SchedulerConfig:
    reservation = rng.choice(RESERVATIONS)
    slots = rng.randint(1, 6)
    budget = rng.randint(8, 30)
    return SchedulerConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        prefill_chunk=rng.randint(2, budget),
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_model_len=LONGEST,
        max_queue_requests=rng.choice([1, 5, 1000]),
        max_steps_ahead=rng.randint(0, 1),
        policy=rng.choice(POLICIES),
        reservation=reservation,
        preemption="recompute" if reservation in GROWING_RESERVATIONS else rng.choice(["pause", "recompute"]),
        priority_preemption=rng.random() < 0.5,
        queue_displacement=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.5,
    )


def simulate(config: SchedulerConfig, workload: DrawnWorkload, **limits: int) -> SimulationResult:
    """Runs with every iteration checked."""
    source = CountedSource(workload.source())
    cost = Conservation(source)
    cost.simulation = Simulator(config, cost, source, **limits)
    result = cost.simulation.run()
    assert cost.num_iterations == result.totals.iterations > 0
    assert len(result.log) == source.num_injected
    return result


@pytest.mark.parametrize("pages", ["tight", "ample"])
@pytest.mark.parametrize("seed", range(25))
def test_no_request_vanishes(seed: int, pages: str) -> None:
    """SIM-1: random workloads; what came in is somewhere in every iteration, and ends once."""
    rng = random.Random(seed)
    # Tight: the longest request fits, two of it do not.
    num_pages = 1 + PAGES_OF_LONGEST * (1 if pages == "tight" else 100)
    num_requests = 60
    result = simulate(draw_config(rng, num_pages), draw_workload(rng, num_requests))
    log = result.log
    outcomes = [log.outcome_of(index) for index in range(len(log))]
    counts = {name: outcomes.count(name) for name in ("completed", "rejected", "expired")}
    assert result.termination == ALL_TERMINAL and sum(counts.values()) == num_requests, counts
    assert counts["completed"] > 0
    assert_in_order(result)


@pytest.mark.parametrize("seed", range(10))
def test_a_run_cut_short_still_has_every_request(seed: int) -> None:
    """SIM-1: whoever is queued or running at the limit is in the log as live."""
    rng = random.Random(seed)
    result = simulate(draw_config(rng, 1 + PAGES_OF_LONGEST), draw_workload(rng, 60), max_iterations=8)
    assert result.termination == ITERATION_LIMIT and result.totals.iterations == 8
    assert_in_order(result)


def assert_in_order(result: SimulationResult) -> None:
    """Arrival, start, first token, last token and end of every request come in this order, as far as they came."""
    log = result.log
    instants = np.array([log.arrived_at, log.started_at, log.first_at, log.last_at, log.ended_at]).T
    for index, row in enumerate(instants.tolist()):
        came = [at for at in row if at == at]
        assert came == sorted(came), f"request {index}: {row}"
        if log.outcome_of(index) == "completed":
            assert len(came) == len(row), f"request {index} completed with {row}"
        if log.outcome_of(index) == "live":
            assert row[-1] != row[-1], f"request {index} is live and ended: {row}"


class Flood(Source):
    """Small requests without end, of a page each: one comes as one ends. At times others come among them.

    Args:
      num_live: small requests at any time.
      others: instant, prompt and output tokens, priority and class of each of the others, in order of time.
    """

    def __init__(self, num_live: int, others: list[tuple[float, int, int, int, str]]) -> None:
        self._others = deque(others)
        self._small = deque([0.0] * num_live)
        self._classes: dict[str, str] = {}
        self.num_taken = 0

    def peek(self) -> float | None:
        return min(self._small[0] if self._small else math.inf, self._others[0][0] if self._others else math.inf)

    def take(self) -> Arrival:
        at, prompt, output, priority, name = self.peek(), 1, 15, 0, "small"
        if self._small and self._small[0] == at:
            self._small.popleft()
        else:
            at, prompt, output, priority, name = self._others.popleft()
        self.num_taken += 1
        request_id = f"{name}-{self.num_taken}"
        prompt_ids = prompt_of(self.num_taken, prompt)
        request = make_request(request_id, prompt_ids, output, priority=priority, tenant=name)
        return Arrival(at, request, output, name)

    def end(self, request_id: str, now: float) -> None:
        """The request has ended."""
        if request_id.startswith("small"):
            self._small.append(now)

    def ended(self, now: float, retry_after_s: float | None = None) -> None:
        """It does not say who; `end` does."""


# Of `optimistic` such requests fill half the pool at most: it leaves a page for each that runs.
@pytest.mark.parametrize(
    "reservation", ["exact", *(pytest.param(each, marks=pytest.mark.slow) for each in ("guaranteed", "expected"))]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_big_and_lowly_requests_start_within_a_bound_of_ten_thousand_full_iterations(
    policy: str, reservation: str
) -> None:
    """SCH-3: 32 pages, kept full by requests of one; every 500 iterations one of 20 pages, or one of least priority."""
    config = SchedulerConfig(
        max_num_seqs=40,
        max_num_batched_tokens=80,
        prefill_chunk=80,
        max_prefill_seqs=40,
        page_size=16,
        num_pages=33,
        max_model_len=512,
        max_queue_requests=60,
        policy=policy,
        reservation=reservation,
        preemption="recompute",
        priority_aging_s=1.0,
        sjf_aging_tokens_per_s=8.0,
        edf_default_s=30.0,
    )
    kinds = [(160, 160, 0, "big"), (1, 15, 50, "lowly")]
    source = Flood(40, [(500.0 * (number + 1), *kinds[number % 2]) for number in range(19)])
    full: list[bool] = []

    class Second:
        def step_s(self, features: StepFeatures) -> float:
            full.append(simulator.scheduler.pages_owned >= 0.9 * 32)
            return 1.0

        def explain(self, features: StepFeatures) -> list[str]:
            return []

    simulator = Simulator(
        config,
        Second(),
        source,
        max_iterations=10_000,
        on_end=lambda request_id: source.end(request_id, simulator._now),
    )
    result = simulator.run()
    assert result.totals.iterations == 10_000
    classes = figures(result, Objectives())["classes"]
    waits = {name: classes[name]["queue_s"]["max"] for name in ("small", "big", "lowly")}
    # Small ones fill the pool but for the time in which a big one waits for its pages, or has its last ones to come.
    assert np.mean(full) > 0.88, np.mean(full)
    # An iteration is a second. Aging outweighs a big one's 320 tokens after 40 of them, 50 points of priority after 50,
    # and who is in front waits for small ones to end, which last 15. Small ones wait while a big one has its pages.
    assert waits["big"] <= 40 + 15 and waits["lowly"] <= 50 + 15 and waits["small"] <= 60, waits
    for name, count in (("big", 10), ("lowly", 9)):
        assert classes[name]["offered"] == classes[name]["completed"] == count, (name, classes[name])
    assert classes["small"]["completed"] > 19_000, "the small ones went on"
    assert sum(each["rejected"] + each["expired"] for each in classes.values()) == 0, "nobody vanished"
