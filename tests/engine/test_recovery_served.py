"""A server's engine goes on after failed steps: what its clients see, and how it ends where there is no going on."""

import asyncio

import httpx
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core import EngineDeadError, RequestFailedError, SamplingParams
from jaxserve.engine import AsyncEngine
from jaxserve.faults import Fault, FaultPlan, InjectedFault, use_fault_plan
from tests.engine.conftest import greedy
from tests.server.running import RunningServer, until


@pytest.fixture
def start(tiny_model_dir):
    """`start()`: a ready engine whose failpoints may strike; it is shut down afterwards."""
    started = []

    def begin():
        use_fault_plan(FaultPlan([]))
        config = EngineConfig(
            model=str(tiny_model_dir),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            num_pages=40,
            decode_buckets=(4,),
            prefill_buckets=(32,),
            table_width_buckets=(8,),
            compile_cache="",
        )
        engine = AsyncEngine(config)
        engine.start()
        started.append(engine)
        until(lambda: engine.state in ("ready", "dead"), 120, "engine ready")
        return engine

    yield begin
    use_fault_plan(None)
    for engine in started:
        engine.shutdown()


async def tokens_of(engine, name, params):
    """Ids as they come, delta by delta, and what ended the stream."""
    found = []
    stream = engine.submit(prompt_token_ids=[5, 6, 7], params=params, request_id=name)
    try:
        async for delta in stream:
            found += delta.token_ids
    except (RequestFailedError, EngineDeadError) as error:
        return found, error
    return found, None


def gather(engine, names, params):
    async def main():
        async with asyncio.timeout(60):
            return await asyncio.gather(*(tokens_of(engine, name, params) for name in names))

    return asyncio.run(main())


PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)


def test_streams_go_on_and_the_culprit_s_fails(start):
    engine = start()
    ((want, _),) = gather(engine, ["alone"], PARAMS)
    faults = [
        Fault("runner.collect", "raise", skip=9),
        Fault("runner.dispatch", "out_of_memory", skip=15, times=2),
        Fault("runner.sample", "raise", request_id="bad", skip=4, times=None),
    ]
    use_fault_plan(FaultPlan(faults))
    found = gather(engine, ["a", "b", "bad", "c"], PARAMS)
    assert [ids for ids, error in (found[0], found[1], found[3]) if error is None] == [want] * 3
    ids, error = found[2]
    assert ids == want[: len(ids)] and "whenever this request had part in it" in str(error)
    assert engine.state == "ready"
    use_fault_plan(None)
    assert gather(engine, ["after"], PARAMS) == [(want, None)]


def test_nan_is_a_500_or_an_error_event_and_others_are_served(start):
    engine = start()
    server = RunningServer(lambda: engine)
    try:
        use_fault_plan(FaultPlan([Fault("runner.dispatch", "nan", request_id="*nan*", times=None)]))
        body = {"model": engine.model_name, "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            failed = client.post("/v1/completions", json=body | {"request_id": "nan-1"})
            assert failed.status_code == 500 and "not a number" in failed.text
            streamed = client.post("/v1/completions", json=body | {"stream": True, "request_id": "nan-2"})
            assert "not a number" in streamed.text and "error" in streamed.text
            assert client.post("/v1/completions", json=body | {"request_id": "other"}).status_code == 200
            assert client.get("/health").status_code == 200
            lines = client.get("/metrics").text.splitlines()
            assert next(line for line in lines if line.startswith("jaxserve:nan_logits_total")).endswith(" 2.0")
    finally:
        server.stop()


@pytest.mark.parametrize("recovery_fails", [False, True])
def test_what_cannot_go_on_dies_once_of_its_first_cause(start, monkeypatch, recovery_fails):
    engine, deaths = start(), []
    original = AsyncEngine._die
    monkeypatch.setattr(AsyncEngine, "_die", lambda self, error: (deaths.append(error), original(self, error))[1])
    faults = [Fault("runner.collect", "raise", skip=3, times=None)]
    faults += [Fault("runner.recover", "raise")] if recovery_fails else []
    use_fault_plan(FaultPlan(faults))
    found = gather(engine, ["a", "b", "c"], greedy(30))
    until(lambda: engine.state == "dead", 30, "engine dead")
    assert all(error is not None for _, error in found)
    assert any(isinstance(error, EngineDeadError) for _, error in found)
    (death,) = deaths
    assert isinstance(death, InjectedFault) and engine.error is death
    first = death.__cause__ if recovery_fails else death
    assert "runner.collect" in str(first)
