"""A run under a stepped clock: an iteration takes a cost from its tokens, and arrivals come at their instants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler import Scheduler, StepPlan, StepResult
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.iteration_cost import IterationCost
from jaxserve.sim.summarizer import summarize
from jaxserve.sim.trace_summary import TraceSummary
from tests.sim.recording import write_trace

COST = IterationCost(fixed_s=0.010, per_row_s=0.0001, per_token_s=0.0001)
"""A small model: 10 ms an iteration, 0.1 ms a token."""


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    at: float
    request: Request


def run(
    arrivals: Iterable[Arrival],
    path: Path,
    config: SchedulerConfig,
    *,
    cost: IterationCost = COST,
    pause_s: Callable[[StepPlan], float] = lambda plan: 0.0,
) -> Path:
    """Runs until everything has ended and writes the trace; arrivals are in order of time.

    `pause_s` is what a plan's iteration takes beyond its cost.
    """
    records: list[dict[str, Any]] = []
    scheduler = Scheduler(config, trace=records.append)
    coming = list(arrivals)
    now = 0.0

    def admit(until: float) -> None:
        while coming and coming[0].at <= until:
            scheduler.add(coming[0].request, coming[0].at)
            del coming[0]

    while coming or not scheduler.idle:
        admit(now)
        plan = scheduler.schedule(now)
        if plan.empty:
            assert coming or scheduler.idle, f"nothing runs and nothing comes; waiting: {scheduler.waiting_ids}"
            now = max(now, coming[0].at) if coming else now
            continue
        now += duration_s(plan, cost) + pause_s(plan)
        admit(now)
        if plan.num_steps > 1:
            result = StepResult((), (), tuple((5,) * row.num_steps for row in plan.decode))
        else:
            result = StepResult((5,) * len(plan.decode), (5,) * len(plan.prefill))
        scheduler.update(plan, result, now)
    scheduler.flush_trace()
    return write_trace(path, config, records)


def duration_s(plan: StepPlan, cost: IterationCost) -> float:
    """What `plan`'s iteration takes."""
    num_rows = len(plan.decode)
    if plan.num_steps > 1:
        return cost.fixed_s * plan.num_steps + cost.per_row_s * plan.decode.num_tokens
    return cost.fixed_s + cost.per_row_s * num_rows + cost.per_token_s * (plan.num_tokens - num_rows)


def summary_of(path: Path) -> TraceSummary:
    """The summary of a trace file."""
    return summarize(TraceReader(path), str(path))
