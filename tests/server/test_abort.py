"""Clients that go away, requests that are cancelled, ids that collide."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading

import grpc
import pytest

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import choice_texts, error_of, events_of, metric_samples, raw_request, read_until, until

LONG = {"prompt": "The sea", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


def leave(connection, how):
    """Ends a connection as clients do."""
    if how == "RST":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                pass
    connection.close()


def counter(client, name):
    return sum(value for key, value in metric_samples(client.get("/metrics").text) if key.startswith(name))


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_generation(server, client, how, n, stream):
    """ABT-1."""
    engine = server.engine.engine
    engine.gate.clear()
    aborted = counter(client, 'jaxserve:request_success_total{engine="0",finished_reason="abort"')
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(raw_request("/v1/completions", LONG | {"n": n, "stream": stream}))
    until(lambda: engine.scheduler.num_running + engine.scheduler.num_waiting == n, what="submitted")
    leave(connection, how)
    # No step ran since, so only the abort can have ended it.
    until(lambda: not engine.has_work, 2, "aborted")
    engine.gate.set()
    until(lambda: engine.clean, 2, "idle-clean")
    now = counter(client, 'jaxserve:request_success_total{engine="0",finished_reason="abort"')
    assert now == aborted + n


def test_a_client_that_leaves_after_some_chunks_stops_the_tokens(server, client):
    """ABT-1: 200 times, in every way, of one choice and of four, whole and streamed, whichever moment it hits.

    Nothing grows: tasks, threads, open files, streams.
    """
    engine = server.engine.engine

    def leave_in_every_way(rounds):
        for number in range(rounds):
            n, stream = (1, 4)[number // 3 % 2], number // 6 % 3 != 0
            ran = engine.stats.iterations
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(raw_request("/v1/completions", LONG | {"stream": stream, "n": n}))
                if stream:
                    read_until(connection, 3)
                else:
                    until(lambda ran=ran: engine.stats.iterations >= ran + 3, what="it runs")
                leave(connection, ("FIN", "RST", "half-close")[number % 3])
        until(lambda: engine.clean, 2, "idle-clean")

    def held():
        return {
            "tasks": server.call(lambda: len(asyncio.all_tasks())),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        }

    leave_in_every_way(18)  # what is made once is made
    before = held()
    leave_in_every_way(200)
    tokens = counter(client, "jaxserve:generation_tokens_total")
    assert counter(client, "jaxserve:generation_tokens_total") == tokens
    assert not server.engine._streams
    until(lambda: all(after <= before[name] + 4 for name, after in held().items()), 10, f"no more than {before}")


@pytest.fixture
def solo(client):
    """Text of a request of its own."""
    return client.post("/v1/completions", json=LONG | {"max_tokens": 30}).json()["choices"][0]["text"]


@pytest.mark.parametrize("when", ["queued", "running", "finishing"])
def test_a_cancelled_request_leaves_its_neighbours_alone(server, client, solo, when):
    engine = server.engine.engine
    answers = []

    def neighbour():
        with server.client() as other:
            answers.append(other.post("/v1/completions", json=LONG | {"max_tokens": 30}).json())

    engine.gate.clear()
    threads = [threading.Thread(target=neighbour) for _ in range(4 if when == "queued" else 2)]
    for thread in threads:
        thread.start()
    until(lambda: engine.scheduler.num_running == len(threads), what="neighbours run")
    victim = socket.create_connection(("127.0.0.1", server.port))
    limit = 2 if when == "finishing" else 120
    victim.sendall(raw_request("/v1/completions", LONG | {"stream": True, "request_id": "victim", "max_tokens": limit}))
    until(lambda: "victim" in server.engine._streams, what="victim is live")
    if when != "queued":
        engine.gate.set()
        read_until(victim, 2)
    assert server.call(lambda: server.engine.abort("victim")) is (
        when != "finishing" or "victim" in server.engine._streams
    )
    assert not server.call(lambda: server.engine.abort("victim")), "a second cancel finds nothing"
    leave(victim, "FIN")
    engine.gate.set()
    for thread in threads:
        thread.join(20)
    assert [answer["choices"][0]["text"] for answer in answers] == [solo] * len(threads)


def grpc_code_of_second(server, request_id):
    """The status of a gRPC call with an id that is live."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            list(stub.Generate(pb.GenerateRequest(text="xyz", request_id=request_id)))
    return failed.value.code()


def test_an_id_that_is_live_over_grpc_is_refused_on_both_fronts(server, client):
    """ABT-4."""
    engine = server.engine.engine
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        first = pb.GenerateRequest(text="abc", request_id="twin", sampling=sampling)
        alone = [token for response in stub.Generate(first) for token in response.token_ids]
        engine.gate.clear()
        call = stub.Generate(first)
        until(lambda: "twin" in server.engine._streams, what="first is live")
        body = {"prompt": "xyz", "request_id": "twin"}
        assert error_of(client.post("/v1/completions", json=body), 409)["code"] == "duplicate_id"
        assert grpc_code_of_second(server, "twin") == grpc.StatusCode.ALREADY_EXISTS
        engine.gate.set()
        assert [token for response in call for token in response.token_ids] == alone
        assert [token for response in stub.Generate(first) for token in response.token_ids] == alone


def test_a_live_id_is_refused_by_status_whatever_the_engine(fake_server, fake_client):
    engine = fake_server.engine
    fake_server.call(engine.hold_off.clear)
    body = {"prompt": "a", "request_id": "twin"}
    with fake_server.client() as other:
        thread = threading.Thread(target=lambda: other.post("/v1/completions", json=body))
        thread.start()
        until(lambda: "twin" in engine.live, what="live")
        assert error_of(fake_client.post("/v1/completions", json=body), 409)["code"] == "duplicate_id"
        assert grpc_code_of_second(fake_server, "twin") == grpc.StatusCode.ALREADY_EXISTS
        fake_server.call(engine.hold_off.set)
        thread.join(10)


def test_a_live_request_id_is_refused_and_may_be_reused_afterwards(server, client):
    """ABT-4."""
    engine = server.engine.engine
    first = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "request_id": "twin"}
    alone = client.post("/v1/completions", json=first).json()
    assert alone["id"] == "twin"
    engine.gate.clear()
    with client.stream("POST", "/v1/completions", json=first | {"stream": True}) as stream:
        until(lambda: "twin" in server.engine._streams, what="first is live")
        with server.client() as other:
            second = other.post("/v1/completions", json=first | {"prompt": "xyz"})
            over_grpc = grpc_code_of_second(server, "twin")
        error = error_of(second, 409)
        assert error["code"] == "duplicate_id" and error["param"] == "request_id" and "twin" in error["message"]
        assert "retry-after" not in second.headers
        assert over_grpc == grpc.StatusCode.ALREADY_EXISTS
        engine.gate.set()
        events = events_of(stream.read().decode())
    assert choice_texts(events)[0] == alone["choices"][0]["text"]
    again = client.post("/v1/completions", json=first).json()
    assert again["choices"] == alone["choices"]
    assert all(value >= 0 for _, value in metric_samples(client.get("/metrics").text)), "a gauge below 0"


def test_an_abort_from_elsewhere_ends_the_stream_with_that_reason(server, client):
    engine = server.engine.engine
    engine.gate.clear()
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "request_id": "gone"}) as stream:
        until(lambda: "gone" in server.engine._streams, what="live")
        assert server.call(lambda: server.engine.abort("gone"))
        engine.gate.set()
        events = events_of(stream.read().decode())
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "abort"


def test_a_stalled_reader_does_not_hold_up_others(server, client):
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stalled.sendall(raw_request("/v1/completions", LONG | {"stream": True, "logprobs": 10}))
        body = read_until(stalled, 1)
        answer = client.post("/v1/completions", json=LONG)
        assert answer.json()["usage"]["completion_tokens"] == 120
        stalled.settimeout(10)
        while b"[DONE]" not in body:
            body += stalled.recv(65536)
    # The reader still gets everything, in order.
    events = [
        json.loads(line[6:]) for line in body.decode("utf-8", "ignore").splitlines() if line.startswith("data: {")
    ]
    tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == 120 and events[-1]["choices"][0]["finish_reason"] == "length"
