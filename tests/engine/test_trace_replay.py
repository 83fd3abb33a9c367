"""What real engines record is decided again by replay, to the byte: the offline class and the server's engine."""

import asyncio

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core import FinishReason, RejectedError, SamplingParams
from jaxserve.core.request import Terms
from jaxserve.engine import AsyncEngine
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import AbortEvent, AddEvent, ExpireEvent, IterationRecord
from jaxserve.sim.replayer import replay
from tests.engine.conftest import greedy, random_prompts
from tests.server.gated_engine import GatedEngine
from tests.server.running import until


def replayed(path):
    """The records of a trace that must replay to the byte."""
    reader = TraceReader(path)
    writer = TraceWriter(path.with_suffix(".again"), model=reader.header.model, config=reader.header.config)
    report = replay(reader, sink=writer)
    writer.close()
    assert report.difference is None, str(report.difference)
    assert path.with_suffix(".again").read_bytes() == path.read_bytes()
    records = list(reader)
    assert report.num_iterations == sum(isinstance(record, IterationRecord) for record in records) > 0
    return records


def events_of(records, kind):
    return [event for record in records for event in record.events if isinstance(event, kind)]


@pytest.fixture
def offline(make_llm, tmp_path):
    """An offline engine with few slots and pages, and its trace file."""
    path = tmp_path / "trace.jsonl"
    llm = make_llm(trace_file=str(path), max_num_seqs=4, num_pages=25)
    yield llm, path
    llm.engine.close()


def test_an_offline_run_with_stops_of_every_kind_replays(offline):
    llm, path = offline
    prompts = random_prompts((9, 70, 3, 40, 100, 1, 20))
    text = llm.generate([prompts[0]], greedy(20), use_tqdm=False)[0].outputs[0].text
    eos = llm.engine.limits.eos_token_ids[0]
    ends_by_eos = SamplingParams(temperature=0, max_tokens=30, min_tokens=4, logit_bias={eos: 100.0})
    params = [greedy(20, stop=(text[4:7],)), greedy(12), ends_by_eos, greedy(0), greedy(5), greedy(1), ends_by_eos]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.close()
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths[1:] == [12, 5, 0, 5, 1, 5]
    records = replayed(path)
    assert [event.reason for event in events_of(records, AbortEvent)] == [FinishReason.STOP]
    assert any(record.queue for record in records)


@pytest.fixture
def served(tiny_model_dir, tmp_path):
    """A server's engine and its trace file."""
    path = tmp_path / "trace.jsonl"
    engine = AsyncEngine(
        EngineConfig(
            model=str(tiny_model_dir),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            num_pages=40,
            max_queue_requests=3,
            priority_preemption=True,
            decode_buckets=(2,),
            prefill_buckets=(32,),
            table_width_buckets=(8,),
            compile_cache="",
            trace_file=str(path),
        ),
        factory=GatedEngine,
    )
    engine.start()
    until(lambda: engine.state in ("ready", "dead"), 120, "engine ready")
    yield engine, path
    engine.engine.gate.set()
    engine.shutdown()


def test_a_servers_run_with_aborts_deadlines_refusals_and_preemption_replays(served):
    engine, path = served

    def submit(name, prompt, max_tokens, n=1, **terms):
        prompt_token_ids, params = [5] * prompt, greedy(max_tokens, n=n)
        return engine.submit(prompt_token_ids=prompt_token_ids, params=params, request_id=name, terms=Terms(**terms))

    async def drive():
        engine.engine.gate.clear()  # all of this comes before the first step, or while one runs
        streams = [submit(f"low{index}", 40, 80, priority=10) for index in range(2)]
        streams.append(submit("late", 1, 9, priority=10, deadline_s=1.0))
        streams.append(submit("high", 9, 9, priority=-10))
        streams.append(submit("last", 40, 40, priority=10))
        with pytest.raises(RejectedError):
            submit("refused", 40, 40, priority=10)
        with pytest.raises(RejectedError):
            submit("too_many", 9, 9, n=2, priority=-20)
        await asyncio.sleep(1.1)
        engine.engine.gate.set()
        async for _ in streams[0]:
            engine.abort("low0")
        async with asyncio.timeout(120):
            for stream in streams[1:]:
                async for _ in stream:
                    pass
        await anext(aiter(submit("endless", 9, 100)))

    asyncio.run(drive())
    engine.shutdown()
    records = replayed(path)
    assert TraceReader(path).header.config.max_steps_ahead == 1
    assert any(record.in_flight for record in records)
    assert records[-1].in_flight == (), "the step that ran when the engine was shut down is missing"
    assert any(record.preempted for record in records if isinstance(record, IterationRecord))
    assert "queue_full_requests" in {event.outcome for event in events_of(records, AddEvent)}
    assert [event.request_id for event in events_of(records, AbortEvent)] == ["low0"]
    assert [event.request_id for event in events_of(records, ExpireEvent)] == ["late"]
