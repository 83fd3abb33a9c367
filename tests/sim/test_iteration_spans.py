"""When iterations ran."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import IterationRecord
from jaxserve.sim.iteration_spans import Span, Spans
from tests.scheduler.harness import Harness, make_config, make_request
from tests.sim.recording import random_run, write_trace


def spans(harness: Harness, path: Path) -> list[Span]:
    reader, given = TraceReader(write_trace(path, harness.config, harness.records)), Spans()
    return [given.of(record) for record in reader if isinstance(record, IterationRecord)]


def test_an_iteration_planned_ahead_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    """Planned at 0, 1 and 2; updated at 1, 2 and 3."""
    harness = Harness(make_config(), lag=1)
    harness.add(make_request("a", 4, 3))
    harness.run()
    assert spans(harness, tmp_path / "t") == [Span(0.0, 1.0), Span(1.0, 2.0), Span(2.0, 3.0)]


def test_idle_time_belongs_to_no_iteration(tmp_path: Path) -> None:
    harness = Harness()
    harness.add(make_request("a", 4, 1))
    harness.run()
    harness.now = 50.0
    harness.add(make_request("b", 4, 1))
    harness.run()
    assert spans(harness, tmp_path / "t") == [Span(0.0, 0.0), Span(50.0, 50.0)]


@pytest.mark.parametrize("seed", range(8))
def test_spans_never_overlap(tmp_path: Path, seed: int) -> None:
    harness = random_run(seed, lag=seed % 4)
    found = spans(harness, tmp_path / "t")
    assert len(found) == sum("kind" not in record for record in harness.records)
    assert all(before.ended_at <= after.began_at for before, after in pairwise(found))
    assert all(span.duration_s >= 0.0 for span in found)
