"""AsyncEngine: streams, cancellation, refusals."""

import asyncio
from dataclasses import replace

import pytest

from jaxserve.core import (
    RejectedError,
    RequestFailedError,
    SamplingParams,
    Submission,
    Terms,
)
from jaxserve.engine import AsyncEngine
from tests.engine.async_engines import idle, small_config, start, wait_for
from tests.engine.conftest import greedy


@pytest.fixture(scope="module")
def config(tiny_model_dir):
    return small_config(tiny_model_dir)


@pytest.fixture(scope="module")
def engine(config):
    engine = start(config)
    asyncio.run(wait_for(lambda: engine.state == "ready"))
    yield engine
    engine.shutdown()
    assert engine.state == "stopped"


def test_a_stream_gives_each_token_once_and_ends(engine):
    async def main():
        stream = engine.submit(prompt_token_ids=[1, 2, 3], params=greedy(20))
        tokens, text, reasons = [], "", []
        async for delta in stream:
            tokens += delta.token_ids
            text += delta.text
            reasons.append(delta.finish_reason)
        whole = await engine.submit(prompt_token_ids=[1, 2, 3], params=greedy(20)).collect()
        assert tokens == whole.outputs[0].token_ids and text == whole.outputs[0].text
        assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}

    asyncio.run(main())


def test_a_slow_reader_gets_everything_merged(engine):
    async def main():
        stream = engine.submit(prompt_token_ids=[1, 2, 3], params=greedy(50))
        await wait_for(lambda: idle(engine))
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1 and len(deltas[0].token_ids) == 50 and deltas[0].finish_reason == "length"

    asyncio.run(main())


def test_cancelling_frees_everything_and_the_rest_goes_on(engine):
    async def main():
        other = engine.submit(prompt_token_ids=[5, 6], params=greedy(60))
        stream = engine.submit(prompt_token_ids=[1, 2], params=SamplingParams(n=3, max_tokens=100, ignore_eos=True))
        async for _ in stream:
            break
        stream.cancel()
        stream.cancel()
        assert not engine.abort(stream.request_id)
        assert len((await other.collect()).outputs[0].token_ids) == 60
        await wait_for(lambda: idle(engine), 5)

    asyncio.run(main())


def test_a_live_id_is_refused_and_free_again_at_the_end(engine):
    async def main():
        first = engine.submit(prompt_token_ids=[1, 2, 3], params=greedy(40), request_id="same")
        with pytest.raises(RejectedError, match="'same' is live") as refused:
            engine.submit(prompt_token_ids=[4], params=greedy(4), request_id="same")
        assert refused.value.rejection.reason == "duplicate_id"
        whole = await first.collect()
        assert len(whole.outputs[0].token_ids) == 40
        again = await engine.submit(prompt_token_ids=[1, 2, 3], params=greedy(40), request_id="same").collect()
        assert again.outputs[0].token_ids == whole.outputs[0].token_ids

    asyncio.run(main())


def test_cancelling_an_ended_request_spares_the_one_that_reuses_its_id(engine):
    async def main():
        first = engine.submit(prompt_token_ids=[1], params=greedy(3), request_id="again")
        await wait_for(lambda: idle(engine))
        second = engine.submit(prompt_token_ids=[1], params=greedy(30), request_id="again")
        first.cancel()
        assert len((await second.collect()).outputs[0].token_ids) == 30
        assert len((await first.collect()).outputs[0].token_ids) == 3

    asyncio.run(main())


def test_more_choices_than_can_ever_wait_are_refused_for_good(engine):
    async def main():
        with pytest.raises(ValueError, match="n is 9; at most 8 choices"):
            engine.submit(prompt_token_ids=[1], params=SamplingParams(n=9))

    asyncio.run(main())


def submissions(count, **params):
    return [Submission([1, 2, 3 + index], greedy(4, **params), f"group-{index}") for index in range(count)]


def test_prompts_of_one_call_are_taken_together_in_their_order(engine):
    async def main():
        streams = engine.submit_all(submissions(3))
        assert [stream.request_id for stream in streams] == ["group-0", "group-1", "group-2"]
        assert [stream.prompt_token_ids[-1] for stream in streams] == [3, 4, 5]
        for stream in streams:
            alone = await engine.submit(prompt_token_ids=stream.prompt_token_ids, params=greedy(4)).collect()
            assert (await stream.collect()).outputs[0].token_ids == alone.outputs[0].token_ids

    asyncio.run(main())


@pytest.mark.parametrize("why", ["last is bad", "id is live", "id twice", "no place", "never a place"])
def test_prompts_of_one_call_are_refused_together(engine, why):
    async def main():
        group = submissions(3)
        live = []
        if why == "last is bad":
            group[2] = replace(group[2], prompt_token_ids=[10**6])
        elif why == "id is live":
            live = [engine.submit(prompt_token_ids=[1], params=greedy(90), request_id="group-2")]
        elif why == "id twice":
            group[2] = replace(group[2], request_id="group-0")
        elif why == "no place":
            live = [engine.submit(prompt_token_ids=[1], params=greedy(90)) for _ in range(6)]
        else:
            group = submissions(9)
        before = len(engine._streams.all())
        with pytest.raises((ValueError, RejectedError)):
            engine.submit_all(group)
        assert len(engine._streams.all()) == before == len(live)
        for stream in live:
            stream.cancel()
        # The ids are free again.
        await wait_for(lambda: idle(engine))
        for stream in engine.submit_all(submissions(3)):
            await stream.collect()

    asyncio.run(main())


def test_the_last_delta_tells_the_times(engine):
    async def main():
        output = (await engine.submit(prompt_token_ids=[1], params=greedy(5)).collect()).outputs[0]
        times = output.metrics
        assert times.arrived_at <= times.first_scheduled_at < times.first_token_at < times.finished_at

    asyncio.run(main())


def test_choices_are_queued_all_or_none(engine):
    async def main():
        running = [engine.submit(prompt_token_ids=[1], params=greedy(100)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(RejectedError, match="queue"):
            engine.submit(prompt_token_ids=[1], params=SamplingParams(n=8, max_tokens=4))
        waiting = [engine.submit(prompt_token_ids=[1], params=greedy(4)) for _ in range(2)]
        for stream in running + waiting:
            await stream.collect()
        await wait_for(lambda: idle(engine), 5)

    asyncio.run(main())


def test_a_deadline_ends_the_request_as_expired(engine):
    async def main():
        output = await engine.submit(prompt_token_ids=[1], params=greedy(120), terms=Terms(deadline_s=0.01)).collect()
        assert output.outputs[0].finish_reason == "expired"
        assert len(output.outputs[0].token_ids) < 120
        await wait_for(lambda: idle(engine), 5)

    asyncio.run(main())


def test_gauges_fall_to_zero_and_aborts_are_counted(engine):
    def value(name, **labels):
        labels = {"model_name": engine.model_name, "engine": "0"} | labels
        return engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels)

    async def main():
        before = value("request_success_total", finished_reason="abort")
        streams = [engine.submit(prompt_token_ids=[1], params=greedy(100)) for _ in range(8)]
        assert value("num_requests_running") + value("num_requests_waiting") == 8
        for stream in streams:
            stream.cancel()
        await wait_for(lambda: idle(engine), 5)
        assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
        assert value("request_success_total", finished_reason="abort") == before + 8

    asyncio.run(main())


def test_a_fault_in_one_requests_text_ends_only_that_request(engine, monkeypatch):
    from jaxserve.engine.output_processor import RequestState

    original = RequestState._take_token

    def faulty(self, *args):
        if self.request.request_id == "bad":
            raise RuntimeError("injected fault")
        return original(self, *args)

    monkeypatch.setattr(RequestState, "_take_token", faulty)

    async def main():
        bad = engine.submit(prompt_token_ids=[1], params=greedy(30), request_id="bad")
        good = engine.submit(prompt_token_ids=[1], params=greedy(30))
        with pytest.raises(RequestFailedError, match="bad failed inside the server"):
            await bad.collect()
        assert len((await good.collect()).outputs[0].token_ids) == 30
        await wait_for(lambda: idle(engine), 5)

    asyncio.run(main())
    assert engine.state == "ready"


def test_a_batch_that_takes_longer_to_fill_than_a_step_may_is_not_stuck(config):
    limits = {"step_timeout_s": 0.25, "stuck_exit_s": 0.1}
    engine = start(replace(config, batching="request_dynamic", batch_timeout_s=1.0, **limits))

    async def main():
        await wait_for(lambda: engine.state == "ready")
        return await engine.submit(prompt_token_ids=[1, 2], params=greedy(3)).collect()

    try:
        output = asyncio.run(main())
        assert output.outputs[0].finish_reason == "length" and engine.state == "ready"
        assert output.outputs[0].metrics.first_token_at - output.outputs[0].metrics.arrived_at > 0.9
    finally:
        engine.shutdown()


def test_each_choice_of_what_is_refused_together_counts(config):
    engine = start(config)

    def refuse(submissions, error, reason):
        """What the counters of refusals for that reason, and of arrivals, gained."""
        names = ("requests_rejected_total", {"reason": reason}), ("requests_offered_total", {})
        labels = {"engine": "0", "model_name": engine.model_name}

        def read():
            return [engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels | more) for name, more in names]

        before = read()
        with pytest.raises(error):
            engine.submit_all(submissions)
        return [after - earlier for after, earlier in zip(read(), before, strict=True)]

    def ask(name, n=1, prompt=(1, 2), adapter=""):
        return Submission(list(prompt), SamplingParams(max_tokens=9, n=n), name, adapter=adapter)

    async def main():
        await wait_for(lambda: engine.state == "ready")
        assert refuse([ask("a", 2), ask("b", 3, prompt=())], ValueError, "invalid") == [5, 5]
        assert refuse([ask("a", 7), ask("b", 2)], ValueError, "invalid") == [9, 9]
        assert refuse([ask("a", 2), ask("b", adapter="none")], RejectedError, "unknown_adapter") == [3, 3]
        assert refuse([ask("a", 2), ask("a", 2)], RejectedError, "duplicate_id") == [4, 4]
        await engine.drain(0.0)
        assert refuse([ask("a", 2), ask("b")], RejectedError, "draining") == [3, 3]
        with pytest.raises(RejectedError):
            engine.submit(prompt_token_ids=[1], params=SamplingParams(n=2))
        assert refuse([ask("a")], RejectedError, "draining") == [1, 1]

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()


def test_an_engine_that_was_shut_down_before_it_was_loaded_refuses(config):
    engine = AsyncEngine(config)
    engine.shutdown()
    with pytest.raises(RejectedError, match="shutting down"):
        _ = engine.engine
    with pytest.raises(RejectedError, match="shutting down"):
        engine.submit(prompt_token_ids=[1], params=SamplingParams(n=2))
