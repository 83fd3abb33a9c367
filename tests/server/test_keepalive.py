"""gRPC connections that are silent for long: clients that ping, clients that are gone."""

import contextlib
import select
import socket
import threading

import grpc
import pytest

from jaxserve.server import grpc_service
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, until

PINGING = (
    ("grpc.keepalive_time_ms", 50),  # grpc makes a second of it
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
REQUEST = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=4))


@contextlib.contextmanager
def silent_server():
    """A server whose requests get no token."""
    server = RunningServer(FakeEngine)
    server.call(server.engine.hold_off.clear)
    try:
        yield server
    finally:
        server.call(server.engine.hold_off.set)
        server.stop()


def pinging_call(stack, server):
    channel = stack.enter_context(grpc.insecure_channel(server.grpc_address, options=PINGING))
    return inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)


def test_clients_that_ping_through_a_silence_are_not_sent_away(monkeypatch):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(silent_server())
        call = pinging_call(stack, server)
        until(lambda: server.engine.live, what="the call has begun")
        monkeypatch.setattr(grpc_service, "KEEPALIVE", ())
        strict = stack.enter_context(silent_server())
        # What grpc does by itself tells that the pings have been too many: the other call, begun before, had as many.
        with pytest.raises(grpc.RpcError, match="Too many pings"):
            list(pinging_call(stack, strict))
        server.call(server.engine.hold_off.set)
        assert len(list(call)) == 4


class Relay:
    """Passes on what one connection brings to a port, until `cut`: then nothing goes through, and nothing closes.

    Attributes:
      given_up: set when the server has closed its end of a connection that was cut.
    """

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.given_up = threading.Event()
        self._port = port
        self._cut = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            while not self._over.is_set():
                for readable in select.select((server,) if self._cut.is_set() else (client, server), (), (), 0.02)[0]:
                    data = readable.recv(65536)
                    if self._cut.is_set():
                        if not data:
                            self.given_up.set()
                            self._over.wait()
                    else:
                        (server if readable is client else client).sendall(data)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self._listener.close()

    def cut(self):
        self._cut.set()


@pytest.mark.parametrize("calls", [1, 0])
def test_a_client_that_is_gone_is_noticed_and_its_call_aborted(monkeypatch, calls):
    faster = [(name, value // 60 if name.endswith("_ms") else value) for name, value in grpc_service.KEEPALIVE]
    monkeypatch.setattr(grpc_service, "KEEPALIVE", faster)
    with silent_server() as server:
        port = int(server.grpc_address.rpartition(":")[2])
        with Relay(port) as relay, grpc.insecure_channel(relay.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            stub.GetModelInfo(pb.GetModelInfoRequest())
            call = stub.Generate(REQUEST) if calls else None
            until(lambda: len(server.engine.live) == calls, what="the call has begun")
            relay.cut()
            until(relay.given_up.is_set, 10, "the server closes the connection")
            until(lambda: server.engine.num_cancelled == calls, what="the request is aborted")
            if call is not None:
                assert not call.done(), "the client cannot know yet"
                call.cancel()
