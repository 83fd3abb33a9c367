"""/debug/state and /debug/trace: the truth about the engine, for those who may see it."""

import json

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.core import ChunkView, EventView, IterationView, Recording
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of, until
from tests.sim.trace_event_format import violations


def iteration(number, decode=(), prefill=(), placed=(), preempted=()):
    began = 10.0 + number
    slots, ids = tuple(slot for slot, _ in decode), tuple(name for _, name in decode)
    return IterationView(
        number,
        began,
        began + 1,
        "b",
        slots,
        ids,
        tuple(map(ChunkView._make, prefill)),
        placed,
        preempted,
        began,
        2,
        5,
        1,
        3,
    )


@pytest.fixture
def recorded(fake_server):
    fake_server.engine.recorded = Recording(
        "fake",
        2,
        (
            iteration(0, prefill=[(0, "a", 7)], placed=(0,)),
            iteration(1, decode=[(0, "a")], prefill=[(1, "b", 3)], placed=(1,)),
            iteration(2, decode=[(1, "b")], preempted=("a",)),
        ),
        (EventView("rejected", 9.5, "c", "queue_full_requests"), EventView("aborted", 12.5, "a", "abort")),
    )
    return fake_server.engine


@pytest.fixture
def keyed():
    keys = (ApiKey("operator"), ApiKey("a-key", "alice"))
    server = RunningServer(FakeEngine, HttpSettings(api_keys=keys))
    yield server
    server.stop()


def spans(document, track):
    events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == track]
    return [(event["name"], event["ts"], event["dur"]) for event in events]


def test_the_trace_has_a_track_per_slot_and_the_events(recorded, fake_client):
    response = fake_client.get("/debug/trace")
    document = response.json()
    assert violations(document) == [] and response.headers["content-type"] == "application/json"
    second = 10**6
    assert spans(document, 1) == [("prefill a", 500_000, second), ("decode a", 1_500_000, second)]
    assert spans(document, 2) == [("prefill b", 1_500_000, second), ("decode b", 2_500_000, second)]
    instants = {event["name"]: event for event in document["traceEvents"] if event["ph"] == "i"}
    assert set(instants) == {"rejected", "aborted", "preempted"}
    assert instants["rejected"]["ts"] == 0 and instants["rejected"]["args"]["reason"] == "queue_full_requests"


def test_iterations_and_seconds_bound_what_is_shown(recorded, fake_client):
    assert fake_client.get("/debug/trace?iterations=2&seconds=1.5").status_code == 200
    assert recorded.asked_recordings == [(2, 1.5)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"trace?iterations={value}", "iterations") for value in ("0", "-1", "x", "1.5", "", "99999999999")),
        *((f"trace?seconds={value}", "seconds") for value in ("0", "-1", "nan", "inf", "x")),
        *((f"state?iterations={value}", "iterations") for value in ("257", "-1", "x")),
    ],
)
def test_a_bad_number_is_named(fake_client, query, param):
    error = error_of(fake_client.get(f"/debug/{query}"), 400)
    assert error["param"] == param and param in error["message"]


def test_without_a_buffer_the_flag_is_named(fake_client):
    assert "--trace_buffer" in error_of(fake_client.get("/debug/trace"), 400)["message"]


@pytest.mark.parametrize("path", ["/debug/state", "/debug/trace?seconds=1"])
def test_they_need_a_key_and_not_a_tenants(keyed, path):
    with keyed.client() as client:
        error_of(client.get(path), 401)
        error = error_of(client.get(path, headers={"Authorization": "Bearer a-key"}), 403)
        assert error["code"] == "operator_key_needed"
        assert client.get(path, headers={"Authorization": "Bearer operator"}).status_code == 200


@pytest.mark.parametrize("path", ["/debug/state", "/debug/trace"])
def test_without_a_model_they_are_unavailable(fake_server, fake_client, path):
    fake_server.engine.state = "loading"
    error_of(fake_client.get(path), 503)


def test_the_state_of_the_real_engine_is_its_schedulers(server, client):
    engine = server.engine.engine
    engine.monitor.keep(50)
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    engine.gate.clear()
    body = {"prompt": "abcd", "n": 6, "max_tokens": 90, "stream": True, "ignore_eos": True, "request_id": "six"}
    body |= {"tenant": "alice", "priority": 3}
    with client.stream("POST", "/v1/completions", json=body), server.client() as other:
        until(lambda: engine.scheduler.num_running == 4, what="four slots are taken")
        state = other.get("/debug/state?iterations=2").json()
        assert (state["num_requests_running"], state["num_requests_waiting"]) == (4, 2)
        assert state["max_num_seqs"] == 4 and state["model"] == "tiny" and state["state"] == "ready"
        assert [slot["slot"] for slot in state["slots"]] == [0, 1, 2, 3]
        first = state["slots"][0]
        assert (first["request_id"], first["phase"], first["tenant"], first["priority"]) == (
            "six#0",
            "prefill",
            "alice",
            3,
        )
        assert (first["prompt_tokens"], first["max_tokens"], first["output_tokens"]) == (4, 90, 0)
        assert [waiting["request_id"] for waiting in state["queue"]] == ["six#4", "six#5"]
        kv = state["kv"]
        assert kv["pages_total"] == kv["pages_free"] + kv["pages_cached"] + kv["pages_owned"] == 79
        assert len(state["iterations"]) == 2 and state["iterations"][-1]["decode"] == [0]
    until(lambda: any(event.name == "aborted" for event in engine.recording(9, 1e6).events), what="aborts are seen")
    engine.gate.set()
    until(lambda: not engine.has_work)
    client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 5, "ignore_eos": True, "request_id": "last"})
    document = client.get("/debug/trace?iterations=5").json()
    assert violations(document) == []
    assert [name for name, *_ in spans(document, 1)] == ["prefill last", "decode last"]
    assert len(spans(document, 0)) == 5
    assert len(client.get("/debug/trace?seconds=0.000001").json()["traceEvents"]) < 20
    totals = client.get("/debug/state").json()["totals"]
    assert totals["prefill_tokens"] > 0 and totals["iterations"] >= 5


def test_the_list_of_the_queue_ends_after_a_few_however_long_it_is(server, client):
    engine = server.engine.engine
    engine.gate.clear()
    body = {"prompt": ["a"] * 60, "max_tokens": 90, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body), server.client() as other:
        until(lambda: engine.scheduler.num_waiting == 56, what="all wait")
        state = other.get("/debug/state").json()
        assert len(state["queue"]) == 20 and state["num_requests_waiting"] == 56
        assert json.dumps(state).count('"age_s"') == 24
    engine.gate.set()
