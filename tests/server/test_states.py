"""Every state of an engine on every surface: the table of docs/reliability.md, cell by cell."""

import contextlib
import re
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.core import NotReadyError
from jaxserve.engine.lifecycle import STATES
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.router.proxy import _NOT_SERVING
from jaxserve.router.settings import HealthSettings, RouterSettings
from jaxserve.server.grpc_service import HEALTH_PERIOD_S
from jaxserve.server.proto import inference_pb2, inference_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from tests.router.upstreams import RunningRouter
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, metric_samples

GUIDE = Path(__file__).parents[2] / "docs/reliability.md"
PROBE_S = 0.02
COLUMNS = ("state", "health", "ready", "grpc_health", "http_request", "grpc_request", "metric", "router")


def table_of(text):
    """The rows, by state."""
    section = text.split("\n## Health in every state\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [dict(zip(COLUMNS, map(str.strip, line.strip("|").split("|")), strict=True)) for line in lines]
    return {row["state"].strip("`"): row for row in rows}


TABLE = table_of(GUIDE.read_text())


def words(cell):
    """What a cell has as code."""
    return re.findall("`([^`]+)`", cell)


class Engine(FakeEngine):
    """With the metrics of a real one, from where that has any on."""

    def __init__(self):
        super().__init__()
        self.made = EngineMetrics("fake")
        self.made.running = SimpleNamespace(set=lambda count: None)  # what a fake stream tells
        self.made.show_state(lambda: self.state, lambda: self.step_age_s)

    @property
    def metrics(self):
        if self.state == "loading":
            raise NotReadyError("the model is loading")
        return self.made

    @metrics.setter
    def metrics(self, fakes):
        """Those that it is made with."""


def enter(server, name):
    """Has the server's engine in a state, as launcher and engine do."""
    engine = server.engine
    if name in ("leaving", "draining"):
        server.service.leave()
    if name == "draining":
        server.service._draining = True
    if name == "dead":
        engine.error = RuntimeError("boom")
    if name in ("stuck", "dead"):
        engine.step_age_s = 61.5
    if name != "leaving":
        engine.state = name


@pytest.fixture
def server():
    server = RunningServer(Engine)
    yield server
    server.stop()


@pytest.fixture
def router(server):
    health = HealthSettings(interval_s=PROBE_S, timeout_s=5.0)
    router = RunningRouter([server.url], RouterSettings(health=health))
    router.until_up(1)
    yield router
    router.stop()


def test_the_table_has_every_state_and_the_leaving_part():
    assert sorted(TABLE) == sorted((*STATES, "leaving"))


@pytest.mark.parametrize("name", TABLE)
def test_every_surface_says_what_the_table_says(server, router, name):
    row = TABLE[name]
    with grpc.insecure_channel(server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert statuses.Name(next(watched).status) == "SERVING"
        server.call(lambda: enter(server, name))
        with server.client() as client:
            check_probe(client.get("/health"), row["health"], name)
            ready = client.get("/ready")
            check_probe(ready, row["ready"], name)
            assert ready.json()["ready"] == (ready.status_code == 200)
            assert metric(client) == words(row["metric"])
            check_request(client, row["http_request"])
        if row["grpc_health"] == "SERVING":
            time.sleep(2 * HEALTH_PERIOD_S)
        else:
            assert statuses.Name(next(watched).status) == row["grpc_health"]
        for service in ("", "jaxserve.v1.Inference"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert statuses.Name(answer.status) == row["grpc_health"], service
        watched.cancel()
        orchestrator = orchestrator_pb2_grpc.OrchestratorStub(channel)
        live = orchestrator.HealthCheck(orchestrator_pb2.HealthCheckRequest()).is_live
        assert live == (row["grpc_health"] == "SERVING")
        sampling = inference_pb2.SamplingParams(max_tokens=1)
        generate = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="a", sampling=sampling)
        )
        assert status_of(generate) == row["grpc_request"]
        content = orchestrator_pb2.DecodeRequest.TextContent(text="a")
        decode = orchestrator.Decode(orchestrator_pb2.DecodeRequest(text_content=content, max_tokens=1))
        assert status_of(decode) == row["grpc_request"]
    if row["router"] == "in":
        time.sleep(10 * PROBE_S)
        assert len(router.call(lambda: router.pool.in_rotation)) == 1
    else:
        router.until_up(0)
        (seen,) = router.call(router.pool.view)
        assert seen["reason"] == f"it is not ready: 503 ({'draining' if name == 'leaving' else name})"


def check_probe(response, cell, name):
    body = response.json()
    assert str(response.status_code) == cell.split()[0]
    assert body["state"] == ("draining" if name == "leaving" else name)
    told = {"progress", "step_age_s", "error"} & body.keys()
    assert told == set(words(cell))
    assert ("reason" in body) == (name != "ready")
    assert body.get("step_age_s") in ((61.5,) if name in ("stuck", "dead") else (None, 0.0))


def metric(client):
    """States whose gauge is 1."""
    samples = dict(metric_samples(client.get("/metrics").text))
    return [
        state
        for state in STATES
        if samples.get(f'jaxserve:engine_state{{engine="0",model_name="fake",state="{state}"}}')
    ]


def check_request(client, cell):
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert str(response.status_code) == cell.split()[0]
    if response.status_code == 200:
        assert not words(cell)
        return
    code = response.json()["error"]["code"]
    assert [code] == words(cell) and "retry-after" in response.headers
    assert code in _NOT_SERVING, "by this answer alone the router takes the replica out of rotation"


def status_of(call):
    """Name of a call's status once it has ended."""
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code().name
