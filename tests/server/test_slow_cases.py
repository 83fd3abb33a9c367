"""STR-3, API-4, OPS-10: stalled readers, huge bodies, calls that end early, on a context of 1024 tokens."""

import gc
import json
import threading
import time
import tracemalloc
import weakref

import grpc
import pytest

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.long_contexts import narrow_connection, serve_long_contexts, unchunked
from tests.server.running import error_of, events_of, raw_request, read_until, until

URL = "/v1/completions"


@pytest.fixture(scope="module")
def long_server(tmp_path_factory):
    """Five slots, a queue of two, a context of 1024."""
    with serve_long_contexts(tmp_path_factory.mktemp("long") / "model", 1024, max_queue_requests=2) as server:
        yield server


@pytest.fixture
def engine(long_server):
    """Its engine; afterwards nothing may be live."""
    engine = long_server.engine.engine
    yield engine
    engine.gate.set()
    until(lambda: engine.clean, 5, "idle-clean")
    engine.scheduler.check_invariants()


def test_str_3_a_stalled_reader_costs_others_nothing_and_gets_everything(long_server, engine):
    count, others = 900, 4
    stalling = {"prompt": "The sea", "max_tokens": count, "ignore_eos": True, "seed": 1, "request_id": "stalled"}
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with long_server.client() as client:
        alone = client.post(URL, json=stalling | {"return_token_ids": True}).json()["choices"][0]["token_ids"]
        solo = client.post(URL, json=body).json()["choices"][0]["text"]
    took = []

    def read():
        with long_server.client() as client:
            events = events_of(client.post(URL, json=body | {"stream": True}).text)
        took.append("".join(event["choices"][0]["text"] for event in events[:-1]))

    with narrow_connection(long_server) as stalled:
        asked = {"stream": True, "logprobs": 20, "return_token_ids": True}
        stalled.sendall(raw_request(URL, stalling | asked))
        data = read_until(stalled, 1)
        stream = long_server.engine._streams.find("stalled")
        engine.gate.clear()
        threads = [threading.Thread(target=read) for _ in range(others)]
        for thread in threads:
            thread.start()
        until(lambda: engine.scheduler.num_running == 1 + others, what="all run")
        before = engine.stats.iterations
        engine.gate.set()
        until(lambda: engine.scheduler.num_running == 1, 60, "the others are done")
        # They had a token in every iteration; the rest is the time it took to look.
        assert engine.stats.iterations - before < 200 * 1.5
        for thread in threads:
            thread.join(60)
        assert took == [solo] * others
        until(lambda: "stalled" not in long_server.engine._streams, 60, "generation ends although nobody reads")
        assert stream._open == 1, "the reader has not been given the end"
        assert len(stream._pending) == 1, "what it did not take is one merged delta"
        stalled.settimeout(20)
        while b"[DONE]" not in data:
            piece = stalled.recv(65536)
            assert piece, "cut off"
            data += piece
    tokens = []
    for event in unchunked(data).split("\n\n"):
        if event.startswith("data: {"):
            tokens += json.loads(event[6:])["choices"][0]["token_ids"]
    assert tokens == alone


@pytest.fixture
def live_bytes():
    """`live_bytes()`: what Python objects made since then hold; the allocator's own keepings are not ours."""
    tracemalloc.start()

    def count():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    yield count
    tracemalloc.stop()


@pytest.mark.parametrize(("size", "status"), [(30_000_000, 413), (8_000_000, 400)])
def test_api_4_huge_prompts_are_refused_while_probes_and_streams_go_on(fake_server, live_bytes, size, status):
    fake_server.engine.step_s = 0.01
    payload = b'{"prompt": "' + b"x" * size + b'"}'
    statuses, polls, gaps, ended = [], [], [], threading.Event()

    def send():
        with fake_server.client() as client:
            response = client.post(URL, content=payload, headers={"Content-Type": "application/json"})
            statuses.append(response.status_code)

    def poll():
        with fake_server.client() as client:
            while not ended.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                polls.append(time.monotonic() - began)
                time.sleep(0.005)

    def stream():
        body = {"prompt": "a", "max_tokens": 90, "stream": True}
        with fake_server.client() as client, client.stream("POST", URL, json=body) as response:
            last = time.monotonic()
            for _ in response.iter_raw():
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

    def send_all():
        senders = [threading.Thread(target=send) for _ in range(4)]
        for thread in senders:
            thread.start()
        for thread in senders:
            thread.join(60)

    send_all()  # what is made once is made
    before = live_bytes()
    watchers = [threading.Thread(target=poll), threading.Thread(target=stream)]
    for thread in watchers:
        thread.start()
    send_all()
    watchers[1].join(60)
    ended.set()
    watchers[0].join(10)
    assert statuses == [status] * 8
    assert len(gaps) >= 90 and max(gaps) < 1
    assert sorted(polls)[int(0.99 * len(polls))] < 0.5
    until(lambda: live_bytes() - before < 1_000_000, 10, "memory returns")


@pytest.fixture
def stub(long_server):
    with grpc.insecure_channel(long_server.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def call(stub, count=900, prompt=8, **options):
    sampling = pb.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[65] * prompt), sampling=sampling), **options)


def status_of(stream):
    """The tokens a call gave and the status it ended with."""
    tokens = []
    try:
        for response in stream:
            tokens += response.token_ids
    except grpc.RpcError as error:
        return tokens, error.code()
    return tokens, grpc.StatusCode.OK


@pytest.fixture
def narrow_stub(long_server):
    """A client of a connection of its own that takes little in unless it reads."""
    options = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(long_server.grpc_address, options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def stall(stub, count):
    """A call of the id "stalled" of which one response is read; its messages are large."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=20)
    stream = stub.Generate(pb.GenerateRequest(text="The sea", sampling=sampling, request_id="stalled"))
    return stream, list(next(stream).token_ids)


def test_str_3_a_stalled_grpc_reader_costs_others_nothing_and_gets_everything(long_server, engine, stub, narrow_stub):
    with long_server.client() as client:
        body = {"prompt": "The sea", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        alone = client.post(URL, json=body).json()["choices"][0]["token_ids"]
        solo = status_of(call(stub, count=100))
        stalled, tokens = stall(narrow_stub, 900)
        stream = long_server.engine._streams.find("stalled")
        others = [call(stub, count=100) for _ in range(3)]
        assert [status_of(other) for other in others] == [solo] * 3
        assert client.get("/health").status_code == 200
        until(lambda: "stalled" not in long_server.engine._streams, 60, "generation ends although nobody reads")
        until(lambda: engine.clean, 5, "slot and pages are given back")
        assert stream._open == 1 and len(stream._pending) == 1, "what it did not take is one merged delta"
        assert len(stream._pending[0].token_ids) > 450, "little was written to somebody who does not read"
    rest, status = status_of(stalled)
    assert status == grpc.StatusCode.OK and tokens + rest == alone


@pytest.mark.parametrize("ends", [True, False])
def test_str_3_a_stalled_grpc_reader_that_leaves_holds_nothing(long_server, engine, stub, narrow_stub, ends, caplog):
    """It leaves before its request has ended, or after."""
    stalled, _ = stall(narrow_stub, 900)
    stream = weakref.ref(long_server.engine._streams.find("stalled"))

    def num_held():
        return sum(len(delta.token_ids) for delta in list(stream()._pending.values()))

    until(lambda: num_held() > 20, 60, "it is written to no more")
    if ends:
        until(lambda: "stalled" not in long_server.engine._streams, 60, "generation ends although nobody reads")
    else:
        engine.gate.clear()
    stalled.cancel()
    if not ends:
        until(lambda: "stalled" not in long_server.engine._streams, what="the request has ended")
        engine.gate.set()
    until(lambda: engine.clean, 5, "slot and pages are given back")
    assert status_of(call(stub, count=1))[1] == grpc.StatusCode.OK  # gRPC itself keeps the last call until the next one
    until(lambda: gc.collect() >= 0 and stream() is None, 5, "nothing of it is kept")
    assert not [record for record in caplog.records if record.name.startswith("grpc")]


def test_ops_10_a_deadline_ends_a_call_and_its_generation(stub, engine):
    tokens, status = status_of(call(stub, timeout=0.2))
    assert status == grpc.StatusCode.DEADLINE_EXCEEDED and len(tokens) < 900
    until(lambda: engine.clean, 2, "idle-clean")


def test_ops_10_a_cancel_in_the_middle_of_a_prompt_ends_it(stub, engine):
    before = engine.stats.iterations
    stream = call(stub, prompt=1000, count=20)  # 63 chunks of 16
    until(lambda: engine.stats.iterations >= before + 3, what="the prompt is under way")
    stream.cancel()
    tokens, status = status_of(stream)
    assert status == grpc.StatusCode.CANCELLED and not tokens
    until(lambda: engine.clean, 2, "idle-clean")
    assert engine.stats.iterations < before + 63


def test_ops_10_a_full_queue_refuses_and_the_accepted_are_unharmed(long_server, stub, engine):
    with long_server.client() as client:
        body = {"prompt": [65] * 8, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        alone = client.post(URL, json=body).json()["choices"][0]["token_ids"]
        engine.gate.clear()
        accepted = [call(stub, count=10) for _ in range(7)]
        until(lambda: engine.scheduler.num_running + engine.scheduler.num_waiting == 7, what="slots and queue are full")
        assert status_of(call(stub)) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
        error_of(client.post(URL, json=body), 429)
        engine.gate.set()
        assert [status_of(stream) for stream in accepted] == [(alone, grpc.StatusCode.OK)] * 7
