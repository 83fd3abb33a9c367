"""Two engines on the tiny model, made once, and what joins them, made per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.engine import AsyncEngine
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.replayer import replay
from tests.disaggregation.pair import Pair, make_engine
from tests.server.running import until


@pytest.fixture(scope="session")
def engines(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AsyncEngine, AsyncEngine]]:
    """A prefill and a decode engine on the tiny model, with traces."""
    folder = tmp_path_factory.mktemp("traces")
    made = [
        make_engine(str(tiny_model_dir), role, trace_file=str(folder / f"{role}.jsonl"))
        for role in ("prefill", "decode")
    ]
    yield made[0], made[1]
    for engine in made:
        engine.shutdown()
        reader = TraceReader(str(engine.config.trace_file))
        report = replay(reader)
        assert report.difference is None, str(report.difference)
        assert report.num_iterations > 0


@pytest.fixture
def pair(engines: tuple[AsyncEngine, AsyncEngine], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """They joined; a parameter has settings of both sides. Afterwards nothing of either is left."""
    joined = Pair(*engines, **getattr(request, "param", {}))
    yield joined
    until(lambda: not len(joined.server._exports), 10, "exports are gone")
    assert joined.server._exports.num_bytes == joined.remote._num_bytes == joined.remote._num_pulls == 0
    joined.close()
    for engine in engines:
        until(lambda engine=engine: not engine.engine.has_work, 60, "the last step has landed")
        scheduler = engine.engine.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.pages_owned) == (0, 0, 0)
        scheduler.check_invariants()
        engine.reset_prefix_cache()
