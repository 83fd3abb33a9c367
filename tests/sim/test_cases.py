"""Faults that users of other simulators reported, as they would show here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import GROWING_RESERVATIONS, POLICIES, RESERVATIONS
from jaxserve.sim.cost_model import StepFeatures
from jaxserve.sim.simulator import ALL_TERMINAL, ITERATION_LIMIT, SimulationResult, Simulator
from jaxserve.sim.source import Arrival, Source
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
