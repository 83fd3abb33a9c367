"""A full queue refuses quickly, by name and in a stable number; gauges return to zero."""

import itertools
import threading
import time

import grpc
import pytest

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import RunningServer, error_of, events_of, metric_samples, until

BODY = {"prompt": "The sea", "max_tokens": 20, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small_server(make_tiny_engine):
    """Two slots and a queue of three."""
    engine = make_tiny_engine(max_num_seqs=2, max_queue_requests=3, num_pages=20)
    server = RunningServer(lambda: engine)
    yield server
    server.stop()


def send_at_once(server, count):
    """`count` requests while no step runs, then a step may; the responses with the seconds each took."""
    answers = []

    def send():
        with server.client() as client:
            began = time.monotonic()
            response = client.post("/v1/completions", json=BODY)
            answers.append((response, time.monotonic() - began))

    engine = server.engine.engine
    engine.gate.clear()
    threads = [threading.Thread(target=send) for _ in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) == count - 5, what="the refused have their answers")
    engine.gate.set()
    for thread in threads:
        thread.join(20)
    return answers


@pytest.mark.parametrize("round_number", range(3))
def test_slots_plus_queue_are_accepted_and_the_rest_refused_at_once(small_server, round_number):
    answers = send_at_once(small_server, 10)
    accepted = [response for response, _ in answers if response.status_code == 200]
    assert len(accepted) == 5
    assert len({response.json()["choices"][0]["text"] for response in accepted}) == 1
    for response, _ in answers:
        if response.status_code != 200:
            error = error_of(response, 429)
            assert error["code"] == "queue_full_requests" and error["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
    until(lambda: small_server.engine.engine.clean, 2, "idle-clean")


@pytest.mark.parametrize("round_number", range(2))
def test_ops_1_over_grpc_slots_plus_queue_are_accepted_too(small_server, round_number):
    sampling = pb.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ended = []

    def call(stub):
        tokens = []
        try:
            for response in stub.Generate(pb.GenerateRequest(text="The sea", sampling=sampling)):
                tokens += response.token_ids
            ended.append(tokens)
        except grpc.RpcError as error:
            ended.append(error.code())

    engine = small_server.engine.engine
    engine.gate.clear()
    with grpc.insecure_channel(small_server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        threads = [threading.Thread(target=call, args=(stub,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        until(lambda: len(ended) == 5, what="the refused have their status")
        assert ended == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 5
        engine.gate.set()
        for thread in threads:
            thread.join(20)
    accepted = ended[5:]
    assert len(accepted) == 5 and len(accepted[0]) == 20 and accepted == [accepted[0]] * 5
    until(lambda: engine.clean, 2, "idle-clean")


def test_a_refusal_takes_less_than_a_tenth_of_a_second(small_server):
    engine = small_server.engine.engine
    engine.gate.clear()
    with small_server.client() as client:
        streams = [small_server.call(lambda: submit(small_server)) for _ in range(5)]
        took = []
        for _ in range(5):
            began = time.monotonic()
            error_of(client.post("/v1/completions", json=BODY), 429)
            took.append(time.monotonic() - began)
        small_server.call(lambda: [stream.cancel() for stream in streams])
        engine.gate.set()
    assert sorted(took)[2] < 0.1
    until(lambda: engine.clean, 2, "idle-clean")


def test_a_full_queue_refuses_before_a_long_prompt_is_tokenised_or_a_grammar_compiled(small_server, monkeypatch):
    engine = small_server.engine.engine
    engine.gate.clear()
    with small_server.client() as client, grpc.insecure_channel(small_server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        streams = [small_server.call(lambda: submit(small_server)) for _ in range(5)]
        before = samples(client)

        def never(*_, **__):
            raise AssertionError("this is work for nothing")

        monkeypatch.setattr(engine.tokenizer, "encode", never)
        monkeypatch.setattr(engine.tokenizer, "encode_chat", never)
        monkeypatch.setattr(engine, "compile_grammar", never)
        long = "a b" * 400
        bodies = [
            ("/v1/completions", BODY | {"prompt": long}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "max_tokens": 5}),
            ("/v1/completions", BODY | {"prompt": [1, 2], "structured_outputs": {"regex": "a+"}}),
        ]
        for path, body in bodies:
            error = error_of(client.post(path, json=body), 429)
            assert error["code"] == "queue_full_requests" and "max_queue_requests" in error["message"]
        after = samples(client)
        label = 'engine="0",model_name="tiny"'
        rejected = f'jaxserve:requests_rejected_total{{{label},reason="queue_full_requests"}}'
        for name in (f"jaxserve:requests_offered_total{{{label}}}", rejected):
            assert after[name] == before[name] + 3, name
        # Choices count singly, as they do when they are taken; of a number that is no valid one, the next that is.
        num_choices = 0
        for (path, body), n in itertools.product(bodies, (3, 0, -1)):
            error_of(client.post(path, json=body | {"n": n}), 429)
            num_choices += max(n, 1)
        for prompts in (["a", long], [[1, 2], [3]]):
            body = BODY | {"prompt": prompts, "n": 2, "structured_outputs": {"regex": "a+"}}
            error_of(client.post("/v1/completions", json=body), 429)
            num_choices += 4
        for sampling in (pb.SamplingParams(n=3), pb.SamplingParams()):
            with pytest.raises(grpc.RpcError, match="max_queue_requests"):
                list(stub.Generate(pb.GenerateRequest(text=long, sampling=sampling)))
            num_choices += sampling.n or 1
        last = samples(client)
        for name in (f"jaxserve:requests_offered_total{{{label}}}", rejected):
            assert last[name] == after[name] + num_choices, name
        monkeypatch.undo()
        # What only converts is not refused: it waits in no queue.
        assert client.post("/tokenize", json={"prompt": long}).status_code == 200
        small_server.call(lambda: [stream.cancel() for stream in streams])
        engine.gate.set()
    until(lambda: engine.clean, 2, "idle-clean")


def test_what_arrived_is_what_ended_was_refused_or_is_live(small_server):
    engine = small_server.engine.engine
    with small_server.client() as client:
        assert client.post("/v1/completions", json=BODY | {"n": 2}).status_code == 200
        assert client.post("/v1/completions", json=BODY | {"prompt": "a" * 200, "max_tokens": 90}).status_code == 400
        engine.gate.clear()
        streams = [small_server.call(lambda: submit(small_server)) for _ in range(5)]
        error_of(client.post("/v1/completions", json=BODY), 429)
        check_conservation(client, 5)
        small_server.call(streams[0].cancel)
        small_server.call(streams[4].cancel)
        engine.gate.set()
        until(lambda: engine.clean, 5, "idle-clean")
        check_conservation(client, 0)


def check_conservation(client, live):
    found = samples(client)

    def total(name):
        return sum(value for key, value in found.items() if key.startswith(f"jaxserve:{name}{{"))

    assert total("num_requests_running") + total("num_requests_waiting") == live
    ended = total("request_success_total") + total("requests_rejected_total")
    assert total("requests_offered_total") == ended + live
    totals = client.get("/debug/state").json()["totals"]
    ended = sum(totals[name] for name in ("completed", "rejected", "expired", "aborted", "failed"))
    assert totals["offered"] == ended + live


def submit(server):
    from jaxserve.core import SamplingParams

    return server.engine.submit(prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=20))


def test_choices_that_do_not_all_fit_are_refused_together(small_server):
    engine = small_server.engine.engine
    engine.gate.clear()
    with small_server.client() as client:
        one = small_server.call(lambda: submit(small_server))
        error_of(client.post("/v1/completions", json=BODY | {"n": 5}), 429)
        small_server.call(one.cancel)
        # More than slots and queue together hold can never be accepted, so a retry is not suggested.
        assert "n is 6" in error_of(client.post("/v1/completions", json=BODY | {"n": 6}), 400)["message"]
        for prompts, n in ((["a"] * 6, 1), (["a"] * 3, 2), ([[1, 2]] * 2, 6)):
            error = error_of(client.post("/v1/completions", json=BODY | {"prompt": prompts, "n": n}), 400)
            assert (
                f"{len(prompts)} prompts ask for {len(prompts) * n} choices in all; the limit is 5" in error["message"]
            )
            assert error["param"] == "prompt"
        one = small_server.call(lambda: submit(small_server))
        before = samples(client)
        error_of(client.post("/v1/completions", json=BODY | {"prompt": ["a"] * 5}), 429)
        rejected = 'jaxserve:requests_rejected_total{engine="0",model_name="tiny",reason="queue_full_requests"}'
        after = samples(client)
        # Refused as one, not taken one by one and aborted when the fifth finds no place.
        offered = 'jaxserve:requests_offered_total{engine="0",model_name="tiny"}'
        assert {name for name in after if "_total" in name and after[name] != before[name]} == {rejected, offered}
        assert after[rejected] == before[rejected] + 5
        small_server.call(one.cancel)
        until(lambda: engine.scheduler.num_running + engine.scheduler.num_waiting == 0, 2, "nothing was left behind")
        engine.gate.set()
        assert client.post("/v1/completions", json=BODY | {"n": 5}).status_code == 200


def samples(client):
    found = dict(metric_samples(client.get("/metrics").text))
    assert all(value == value and value >= 0 for value in found.values()), "NaN or negative"
    return found


@pytest.mark.parametrize("slots", [2, 20])
def test_gauges_fall_to_zero_after_twenty_requests_were_cancelled(make_tiny_engine, slots):
    engine = make_tiny_engine(max_num_seqs=slots, max_queue_requests=20 - slots, num_pages=60, decode_buckets=(slots,))
    server = RunningServer(lambda: engine)
    try:
        check_gauges_fall_to_zero(server, slots)
    finally:
        server.stop()


def check_gauges_fall_to_zero(small_server, slots):
    engine = small_server.engine.engine
    with small_server.client() as client:
        untouched = samples(client)  # before any traffic
        assert gauge(untouched, "num_requests_running") == gauge(untouched, "num_requests_waiting") == 0
        client.post("/v1/completions", json=BODY)  # so that every counter has a line
        before = samples(client)
        engine.gate.clear()
        streams = [small_server.call(lambda: submit(small_server)) for _ in range(20)]
        during = samples(client)
        assert gauge(during, "num_requests_running") == slots
        assert gauge(during, "num_requests_waiting") == 20 - slots
        small_server.call(lambda: [stream.cancel() for stream in streams])
        # No more traffic and no step: the gauges follow the aborts themselves.
        until(lambda: gauge(samples(client), "num_requests_running") == 0, 2, "running gauge is 0")
        after = samples(client)
        engine.gate.set()
    assert gauge(after, "num_requests_waiting") == 0
    abort = 'jaxserve:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert after[abort] == before[abort] + 20
    assert all(after[name] >= value for name, value in before.items() if "_total" in name or "_count" in name)
    until(lambda: gauge_is_clean(small_server), 2, "KV usage is 0")


def gauge_is_clean(server):
    with server.client() as client:
        return gauge(samples(client), "kv_cache_usage_perc") == 0


def gauge(found, name):
    return found[f'jaxserve:{name}{{engine="0",model_name="tiny"}}']


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_pool_can_never_hold_is_refused_at_once_and_others_are_served(make_tiny_engine, stream):
    # Three pages of 16 tokens; the context is 128.
    engine = make_tiny_engine(num_pages=4, max_num_seqs=2)
    server = RunningServer(lambda: engine)
    try:
        with server.client() as client:
            engine.engine.gate.clear()  # at once: no step is needed to know
            body = {"max_tokens": 4, "temperature": 0, "stream": stream}
            error = error_of(client.post("/v1/completions", json=body | {"prompt": [65] * 60}), 400)
            assert "pages" in error["message"]
            engine.engine.gate.set()
            small = client.post("/v1/completions", json=body | {"prompt": [65] * 3, "stream": False})
            assert small.json()["usage"]["completion_tokens"] == 4
        until(lambda: engine.engine.clean, 2, "idle-clean")
    finally:
        server.stop()


def test_when_the_engine_dies_open_requests_get_errors_and_health_says_so(make_tiny_engine):
    engine = make_tiny_engine(max_num_seqs=2, max_queue_requests=3, num_pages=20)
    server = RunningServer(lambda: engine)
    try:
        with server.client() as client, server.client() as other:
            engine.engine.gate.clear()
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
                until(lambda: engine.engine.has_work, what="submitted")
                whole = []
                thread = threading.Thread(target=lambda: whole.append(other.post("/v1/completions", json=BODY)))
                thread.start()
                until(lambda: len(engine._streams) == 2, what="both are live")
                engine.engine.fault = RuntimeError("broken on purpose")
                engine.engine.gate.set()
                events = events_of(stream.read().decode())
                thread.join(10)
            assert events[-1]["error"]["code"] == "engine_dead" and "[DONE]" not in events
            assert error_of(whole[0], 503)["code"] == "engine_dead"
            assert client.get("/health").status_code == 503
            began = time.monotonic()
            error_of(client.post("/v1/completions", json=BODY), 503)
            assert time.monotonic() - began < 1
    finally:
        server.stop()
