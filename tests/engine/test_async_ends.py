"""AsyncEngine: what is open when the engine dies, hangs or drains, and how it is told and counted."""

import asyncio
import threading

import pytest

from jaxserve.core import (
    CutShortError,
    EngineDeadError,
    EngineStuckError,
    FinishReason,
    NotReadyError,
    RejectedError,
    RequestFailedError,
    UnfollowableError,
)
from jaxserve.engine import Engine
from tests.engine.async_engines import idle, small_config, start, wait_for
from tests.engine.conftest import greedy


@pytest.fixture(scope="module")
def config(tiny_model_dir):
    return small_config(tiny_model_dir)


class FaultyEngine(Engine):
    """Raises in the step after `fault` is set."""

    fault = threading.Event()

    def step(self):
        if self.fault.is_set() and self.has_work:
            raise RuntimeError("injected fault")
        return super().step()


def test_death_reaches_open_streams_and_later_submits(config):
    """An open stream raises, it does not hang; so does every later submit."""

    async def main():
        FaultyEngine.fault.clear()
        records = []
        engine = start(config, factory=lambda c, p: FaultyEngine(c, progress=p), on_request_end=records.append)
        with pytest.raises(NotReadyError, match="starting"):
            engine.submit(prompt_token_ids=[1], params=greedy(1))
        await wait_for(lambda: engine.state == "ready")
        stream = engine.submit(prompt_token_ids=[1], params=greedy(100))
        engine.submit(prompt_token_ids=[1], params=greedy(100, n=2))  # which nobody reads
        with pytest.raises(EngineDeadError, match="RuntimeError"):
            async for _ in stream:
                FaultyEngine.fault.set()
        assert engine.state == "dead" and isinstance(engine.error, RuntimeError)
        with pytest.raises(EngineDeadError):
            engine.submit(prompt_token_ids=[1], params=greedy(1))
        await wait_for(lambda: len(records) == 3, 5)
        check_ends(engine, records, ["engine_dead"] * 3)
        engine.shutdown()
        assert engine.state == "dead"

    asyncio.run(main())


def check_ends(engine, records, causes):
    """All that came has failed, of these causes, and the sums hold."""
    assert [(each.outcome, each.cause) for each in records] == [("error", cause) for cause in causes]
    assert (engine.totals.offered, engine.totals.failed, engine.totals.aborted) == (len(causes), len(causes), 0)

    def count(name, **labels):
        labels |= {"engine": "0", "model_name": engine.model_name}
        return engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels)

    assert count("requests_offered_total") == len(causes)
    assert count("request_success_total", finished_reason="error") == len(causes)
    assert count("request_success_total", finished_reason="abort") == 0


def test_what_is_open_when_the_engine_is_stuck_ends_as_that(config):
    records = []

    async def main():
        engine = start(config, on_request_end=records.append)
        await wait_for(lambda: engine.state == "ready")
        stream = engine.submit(prompt_token_ids=[1], params=greedy(100, n=2))
        stream.fail(EngineStuckError("no step"))
        stream.cancel(FinishReason.EXPIRED)  # whatever its reader says: its client has been told
        await wait_for(lambda: idle(engine), 5)
        check_ends(engine, records, ["engine_stuck"] * 2)
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RequestFailedError("broken"), "error"), (UnfollowableError("no token"), "unfollowable"), (None, "expired")],
)
def test_what_is_left_of_a_request_ends_as_the_choice_that_failed_or_as_its_reader_says(config, error, outcome):
    records = []

    async def main():
        engine = start(config, on_request_end=records.append)
        await wait_for(lambda: engine.state == "ready")
        stream = engine.submit(prompt_token_ids=[1], params=greedy(100))
        if error is not None:
            stream.fail(error)
        stream.cancel(FinishReason.EXPIRED)
        await wait_for(lambda: idle(engine), 5)
        engine.shutdown()

    asyncio.run(main())
    assert [(each.outcome, each.cause) for each in records] == [(outcome, "")]


def test_draining_finishes_what_runs_and_refuses_what_comes(config):
    """Running streams get all their tokens; a submit meanwhile is refused as draining."""

    async def main():
        engine = start(config)
        await wait_for(lambda: engine.state == "ready")
        streams = [engine.submit(prompt_token_ids=[1], params=greedy(30)) for _ in range(3)]
        draining = asyncio.ensure_future(engine.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(RejectedError, match="shutting down") as refused:
            engine.submit(prompt_token_ids=[1], params=greedy(1))
        assert refused.value.rejection.reason == "draining"
        for stream in streams:
            assert (await stream.collect()).outputs[0].finish_reason == "length"
        assert await draining
        engine.shutdown()

    asyncio.run(main())


def test_past_the_grace_period_what_is_left_fails(config):
    class Slow(Engine):
        def step(self):
            threading.Event().wait(0.02)
            return super().step()

    async def main():
        records = []
        engine = start(config, factory=lambda c, p: Slow(c, progress=p), on_request_end=records.append)
        await wait_for(lambda: engine.state == "ready")
        stream = engine.submit(prompt_token_ids=[1], params=greedy(100))
        assert not await engine.drain(0.1)
        with pytest.raises(CutShortError, match="shutting down"):
            await stream.collect()
        await wait_for(lambda: idle(engine), 5)
        check_ends(engine, records, ["draining"])
        engine.shutdown()

    asyncio.run(main())
