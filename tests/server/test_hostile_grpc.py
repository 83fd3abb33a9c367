"""Frames, calls and messages that gRPC's port gets from nobody's client: refused, and calls go on beside them."""

from __future__ import annotations

import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


RAW = {
    "garbage": bytes(range(256)) * 20,
    "HTTP/1.1": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "a preface and garbage": PREFACE + bytes(range(256)) * 20,
    "a frame of 16 MB": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100_000),
    "headers that are no HPACK": PREFACE + SETTINGS + frame(1, 5, 1, b"\xff" * 200),
    "data without a stream": PREFACE + SETTINGS + frame(0, 0, 99, b"x" * 100),
    "a continuation of nothing": PREFACE + SETTINGS + frame(9, 4, 1, b"x" * 100),
    "settings of a wrong size": PREFACE + frame(4, 0, 0, b"x" * 5),
    "a thousand resets": PREFACE + SETTINGS + b"".join(frame(3, 0, 2 * i + 1, bytes(4)) for i in range(1000)),
    "a thousand pings": PREFACE + SETTINGS + frame(6, 0, 0, bytes(8)) * 1000,
    "a window of nothing": PREFACE + SETTINGS + frame(8, 0, 0, bytes(4)),
    "half a preface": PREFACE[:10],
}


@pytest.fixture(scope="module")
def grpc_server():
    """A server that takes messages of at most 64 KiB."""
    server = RunningServer(FakeEngine, HttpSettings(max_body_bytes=1 << 16))
    yield server
    server.stop()


@pytest.fixture
def channel(grpc_server):
    with grpc.insecure_channel(grpc_server.grpc_address) as channel:
        yield channel


@pytest.fixture
def serving(channel):
    """`serving()`: calls are answered."""

    def check():
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = inference_pb2_grpc.InferenceStub(channel)
        tokens = [
            t
            for r in stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])), timeout=10)
            for t in r.token_ids
        ]
        assert tokens

    return check


@pytest.mark.parametrize("name", RAW)
def test_frames_that_break_the_protocol_harm_nobody_else(grpc_server, serving, name):
    port = int(grpc_server.grpc_address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.3)
        received = b""
        try:
            connection.sendall(RAW[name])
            while len(received) < 1 << 20 and (chunk := connection.recv(65536)):
                received += chunk
        except OSError:  # a reset, or silence: pings are answered and the connection goes on
            pass
    assert len(received) < 1 << 20
    serving()


def unary(channel, method, payload, **options):
    """The status of a call of raw bytes."""
    call = channel.unary_unary(method, lambda data: data, lambda data: data)
    with pytest.raises(grpc.RpcError) as failed:
        call(payload, timeout=10, **options)
    return failed.value.code()


TOKENIZE = "/jaxserve.v1.Inference/Tokenize"


@pytest.mark.parametrize("payload", [b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x0b" * 2000])
def test_bytes_that_are_no_message_are_refused(channel, serving, payload):
    assert unary(channel, TOKENIZE, payload) == grpc.StatusCode.INVALID_ARGUMENT
    serving()


@pytest.mark.parametrize("method", ["/jaxserve.v1.Inference/Nothing", "/no.Service/Tokenize", "/", "//", "/a"])
def test_unknown_methods_are_unimplemented(channel, serving, method):
    assert unary(channel, method, b"") == grpc.StatusCode.UNIMPLEMENTED
    serving()


def test_a_message_over_the_limit_is_refused(channel, serving):
    payload = pb.TokenizeRequest(text="a" * 100_000).SerializeToString()
    assert unary(channel, TOKENIZE, payload) == grpc.StatusCode.RESOURCE_EXHAUSTED
    serving()


def test_a_compressed_bomb_is_refused_by_its_size_unpacked(channel, serving):
    payload = pb.TokenizeRequest(text="a" * 50_000_000).SerializeToString()
    code = unary(channel, TOKENIZE, payload, compression=grpc.Compression.Gzip)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    serving()


def test_huge_metadata_is_refused(channel, serving):
    metadata = [(f"x-{index}", "a" * 1000) for index in range(1000)]
    assert unary(channel, TOKENIZE, b"", metadata=metadata) == grpc.StatusCode.RESOURCE_EXHAUSTED
    serving()


def test_calls_that_are_reset_at_once_leave_nothing(grpc_server, channel, serving):
    stub = inference_pb2_grpc.InferenceStub(channel)
    for _ in range(300):
        stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))).cancel()
    until(lambda: not grpc_server.engine.live, 10, "nothing is live")
    serving()
