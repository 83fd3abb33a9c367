"""Servers for the tests of this folder, with checks that every test leaves them clean."""

from __future__ import annotations

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, until
from tests.server.server_process import ServerProcess

BASELINE = {"prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def server(tiny_server):
    """The shared server; afterwards nothing may be live and no page owned."""
    yield tiny_server
    engine = tiny_server.engine.engine
    engine.gate.set()
    until(lambda: engine.clean, 5, "idle-clean")
    engine.scheduler.check_invariants()


@pytest.fixture
def client(server):
    """An HTTP client of the shared server."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def baseline(tiny_server):
    """Token ids of the fixed request that shows the server is unharmed."""
    with tiny_server.client() as client:
        return client.post("/v1/completions", json=BASELINE).json()["choices"][0]["token_ids"]


@pytest.fixture
def alive(client, baseline):
    """`alive()`: /health is 200 and the fixed request gives what it always gave."""

    def check():
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=BASELINE).json()["choices"][0]["token_ids"] == baseline

    return check


@pytest.fixture
def fake_server():
    """A server over a `FakeEngine`."""
    server = RunningServer(FakeEngine)
    yield server
    server.call(server.engine.hold_off.set)
    server.stop()


@pytest.fixture
def fake_client(fake_server):
    """An HTTP client of it."""
    with fake_server.client() as client:
        yield client


@pytest.fixture
def start():
    """`start(*arguments)`: a `ServerProcess` that ends with the test."""
    started = []

    def begin(*arguments, **environment):
        started.append(ServerProcess(*arguments, **environment))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(10)
        server.process.stdout.close()
        server.process.stderr.close()
