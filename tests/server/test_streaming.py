"""Event streams: usage chunks, ends and errors."""

import threading

import pytest

from jaxserve.core import EngineDeadError, Terms
from tests.server.running import error_of, events_of, until

BODIES = {
    "/v1/completions": {"prompt": "The sea"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
SETTINGS = {"n": 2, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def check_events(events):
    """Every event is a chunk with known keys; one finish per choice, nothing after it; one [DONE], last."""
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    finished = set()
    for event in events[:-1]:
        assert {"id", "object", "created", "model", "choices"} <= set(event)
        for choice in event["choices"]:
            assert choice["index"] not in finished
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert finished == {0, 1}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_last_and_only_when_asked(client, path, options):
    body = BODIES[path] | SETTINGS
    whole = client.post(path, json=body).json()
    events = events_of(client.post(path, json=body | {"stream": True, "stream_options": options}).text)
    check_events(events)
    if options and options.get("include_usage"):
        assert events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])
        assert whole["usage"]["completion_tokens"] == 12
    else:
        assert all("usage" not in event and event["choices"] for event in events[:-1])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("fault", ["request fails", "engine dies", "deadline passes"])
def test_a_fault_ends_an_open_stream_with_an_error_object(fake_server, fake_client, path, step, fault):
    engine = fake_server.engine
    if fault == "deadline passes":
        engine.expire_after, code = step, "deadline_exceeded"
    else:
        engine.fail_after, code = step, "request_failed"
    if fault == "engine dies":
        engine.fault, code = EngineDeadError("it died"), "engine_dead"
    response = fake_client.post(path, json=BODIES[path] | SETTINGS | {"stream": True})
    assert response.status_code == 200
    events = events_of(response.text)
    assert "[DONE]" not in events and events[-1]["error"]["code"] == code
    assert all("error" not in event for event in events[:-1])
    assert not any(c["finish_reason"] for event in events[:-1] for c in event["choices"])
    until(lambda: not engine.live, what="nothing is left running")


@pytest.mark.parametrize("path", BODIES)
def test_the_same_faults_without_a_stream_are_statuses(fake_server, fake_client, path):
    engine = fake_server.engine
    engine.fail_after = 1
    error_of(fake_client.post(path, json=BODIES[path]), 500)
    engine.fault = EngineDeadError("it died")
    response = fake_client.post(path, json=BODIES[path])
    error_of(response, 503)
    assert int(response.headers["retry-after"]) >= 1
    engine.fail_after, engine.expire_after = None, 1
    assert error_of(fake_client.post(path, json=BODIES[path]), 504)["code"] == "deadline_exceeded"


def test_an_unexpected_fault_is_a_plain_500_that_tells_no_secrets(fake_server, fake_client, caplog):
    fake_server.engine.fail_after, fake_server.engine.fault = 0, RuntimeError("a secret prompt")
    error = error_of(fake_client.post("/v1/completions", json={"prompt": "a"}), 500)
    assert "secret" not in error["message"]


def test_a_deadline_and_a_priority_reach_the_engine(fake_server, fake_client):
    body = {"prompt": "a", "deadline_s": 2.5, "priority": "high", "max_tokens": 1}
    assert fake_client.post("/v1/completions", json=body).status_code == 200
    submitted = fake_server.engine.submitted[-1]
    assert submitted["terms"] == Terms(priority=-10, deadline_s=2.5)


def test_a_deadline_that_passes_in_the_queue_is_a_504(server, client):
    server.engine.engine.gate.clear()
    body = {"prompt": "a", "deadline_s": 0.05}
    # The gate holds the step that would notice, so it opens after the deadline.
    threading.Timer(0.2, server.engine.engine.gate.set).start()
    assert error_of(client.post("/v1/completions", json=body), 504)["code"] == "deadline_exceeded"
