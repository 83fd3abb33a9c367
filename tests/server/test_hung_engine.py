"""The engine's thread hangs while it holds the engine's lock, as in a write of its trace: everybody is answered."""

import socket
import threading
import time

import httpx
import pytest

from jaxserve.engine import engine_lock
from tests.server.running import RunningServer, error_of, events_of, metric_samples, raw_request, read_until, until

URL = "/v1/completions"
BODY = {"prompt": "The sea", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
STEP_TIMEOUT_S, PATIENCE_S, BOUND_S = 2.5, 0.2, 1.0


class Hang:
    """Called under the lock in every step; hangs from `begin` to `end`."""

    def __init__(self, then):
        self._then = then
        self._entered, self._may_leave = threading.Event(), threading.Event()
        self._may_leave.set()

    def __call__(self, *words):
        if not self._may_leave.is_set():
            self._entered.set()
            assert self._may_leave.wait(60)
        return self._then(*words)

    def begin(self):
        self._may_leave.clear()
        assert self._entered.wait(10)

    def end(self):
        self._may_leave.set()


@pytest.fixture
def hung(make_tiny_engine, monkeypatch):
    """A server and the `Hang` of its engine."""
    monkeypatch.setattr(engine_lock, "PATIENCE_S", PATIENCE_S)
    engine = make_tiny_engine(step_timeout_s=STEP_TIMEOUT_S, stuck_exit_s=0.0)
    monitor = engine.engine.monitor
    hang = Hang(monitor.iteration)
    monkeypatch.setattr(monitor, "iteration", hang)
    server = RunningServer(lambda: engine)
    try:
        yield server, hang
    finally:
        hang.end()
        server.stop()


def answer(client, method, path, **fields):
    """An answer that comes soon."""
    began = time.monotonic()
    response = client.request(method, path, timeout=10, **fields)
    assert time.monotonic() - began < BOUND_S, f"{path} took {time.monotonic() - began:.2f} s"
    return response


def gauges(text):
    values = dict(metric_samples(text))
    labels = '{engine="0",model_name="tiny"}'
    return [values[f"jaxserve:{name}{labels}"] for name in ("num_requests_running", "num_requests_waiting")]


def test_probes_new_requests_and_clients_that_leave_wait_for_no_hang(hung):
    server, hang = hung
    engine = server.engine.engine
    stays = []
    with httpx.Client(base_url=server.url) as client:
        engine.step_s = 0.02
        body = BODY | {"stream": True}
        reader = threading.Thread(target=lambda: stays.append(client.post(URL, json=body, timeout=60)))
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(raw_request(URL, body))
            read_until(leaving, 1)
            reader.start()
            until(lambda: engine.scheduler.num_running == 2, what="both run")
            assert gauges(client.get("/metrics").text) == [2, 0]
            hang.begin()
        # Not yet known as stuck: somebody has the lock, and does not give it back.
        assert answer(client, "GET", "/health").json()["state"] == "ready"
        assert gauges(answer(client, "GET", "/metrics").text) == [2, 0], "the last that were seen"
        for fields in ({}, {"structured_outputs": {"regex": "a+"}}, {"n": 2}):
            assert error_of(answer(client, "POST", URL, json=BODY | fields), 503)["code"] == "engine_stuck"
        assert answer(client, "GET", "/v1/models").status_code == 200
        for path in ("/load", "/debug/state", "/debug/trace"):
            assert error_of(answer(client, "GET", path), 503)["code"] == "engine_stuck"
        until(lambda: len(engine._late_aborts) == 1, what="the one who left is known")
        until(lambda: server.engine.state == "stuck", what="stuck")
        reader.join(10)
        assert events_of(stays[0].text)[-1]["error"]["code"] == "engine_stuck"
        assert answer(client, "GET", "/health").json()["state"] == "stuck"
        assert answer(client, "GET", "/ready").status_code == 503
        assert gauges(answer(client, "GET", "/metrics").text) == [2, 0]
        assert error_of(answer(client, "POST", URL, json=BODY), 503)["code"] == "engine_stuck"
        hang.end()
        until(lambda: engine.clean, what="those that left have ended")
        engine.step_s = 0.0
        assert client.get("/health").json()["state"] == "ready"
        assert gauges(client.get("/metrics").text) == [0, 0]
        assert client.post(URL, json=BODY, timeout=30).status_code == 200
        totals = client.get("/debug/state").json()["totals"]
        ended = [totals[name] for name in ("completed", "rejected", "expired", "aborted", "failed")]
        assert totals["offered"] == sum(ended) == 3 and totals["completed"] == 1
    engine.scheduler.check_invariants()
