"""When iterations ran: from what a record tells, or from the first instant known after it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxserve.scheduler import Scheduler, StepPlan, StepResult
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.iteration_spans import spans
from tests.scheduler.harness import make_config, make_request
from tests.sim.recording import random_run, write_trace


class Recording:
    """A scheduler whose calls are made one by one; tokens are all 5."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.scheduler = Scheduler(make_config(), trace=self.records.append)

    def update(self, plan: StepPlan, now: float) -> None:
        self.scheduler.update(plan, StepResult((5,) * len(plan.decode), (5,) * len(plan.prefill)), now)

    def spans(self, path: Path) -> list[tuple[float, float]]:
        self.scheduler.flush_trace()
        write_trace(path, self.scheduler.config, self.records)
        return [(span.began_at, span.ended_at) for span in spans(TraceReader(path))]


def test_an_iteration_ends_at_its_update_or_at_the_next_thing_known(tmp_path: Path) -> None:
    run = Recording()
    scheduler = run.scheduler
    scheduler.add(make_request("a", 4, 4), 0.0)
    run.update(scheduler.schedule(1.0), 1.9)  # known from the plan at 2.0
    run.update(scheduler.schedule(2.0), 2.5)  # known from the arrival at 2.6
    scheduler.add(make_request("b", 4, 2), 2.6)
    run.update(scheduler.schedule(3.0), 3.9)  # known from the plan at 4.0
    run.update(scheduler.schedule(4.0), 4.5)  # a and b end
    assert run.spans(tmp_path / "t") == [(1.0, 2.0), (2.0, 2.6), (3.0, 4.0), (4.0, 4.5)]


def test_an_iteration_planned_ahead_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    run = Recording()
    run.scheduler.add(make_request("a", 4, 3), 0.0)
    first, second = run.scheduler.schedule(1.0), run.scheduler.schedule(1.1)
    run.update(first, 2.0)  # known from the third plan
    third = run.scheduler.schedule(2.1)
    run.update(second, 3.0)  # no plan follows: known from the end of the request
    run.update(third, 4.0)
    assert run.spans(tmp_path / "t") == [(1.0, 2.1), (2.1, 4.0), (4.0, 4.0)]


def test_an_idle_engine_does_not_stretch_the_last_iteration(tmp_path: Path) -> None:
    run = Recording()
    run.scheduler.add(make_request("a", 4, 9), 0.0)
    plan = run.scheduler.schedule(1.0)
    run.scheduler.abort("a", 1.25)
    run.update(plan, 1.5)
    run.scheduler.add(make_request("b", 4, 1), 100.0)
    run.update(run.scheduler.schedule(100.0), 101.0)
    assert run.spans(tmp_path / "t") == [(1.0, 1.25), (100.0, 101.0)]


def test_a_trace_that_breaks_off_ends_with_its_last_instant(tmp_path: Path) -> None:
    run = Recording()
    run.scheduler.add(make_request("a", 4, 9), 0.0)
    plan = run.scheduler.schedule(1.0)
    run.scheduler.add(make_request("b", 4, 9), 1.5)
    run.update(plan, 2.0)
    assert run.spans(tmp_path / "t") == [(1.0, 1.5)]


@pytest.mark.parametrize("seed", range(8))
def test_every_iteration_has_one_span_and_none_overlap(tmp_path: Path, seed: int) -> None:
    harness = random_run(seed, lag=seed % 4)
    path = write_trace(tmp_path / "t", harness.config, harness.records)
    found = list(spans(TraceReader(path)))
    assert [span.record.iteration for span in found] == list(range(len(found)))
    assert len(found) == sum("kind" not in record for record in harness.records)
    assert all(before.ended_at <= after.began_at for before, after in pairwise(found))
    assert all(span.duration_s >= 0.0 for span in found)
