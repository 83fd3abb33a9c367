"""The doctor reads a live server's metrics."""

import json
import re

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.doctor import main
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer


def test_a_live_server_is_examined(server, capsys):
    with server.client() as client:
        body = {"model": "tiny", "prompt": [5] * 9, "max_tokens": 6, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert main(["prog", f"--url={server.url}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    summary = report["summary"]
    assert summary["ended"]["completed"] >= 1 and summary["ttft_s"]["count"] >= 1
    assert summary["itl_s"]["count"] >= 5 and summary["e2e_s"]["p50"] > 0.0
    assert all(diagnosis["says"] for diagnosis in report["diagnoses"])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("stopped", "stopped: the engine has stopped; the server must be restarted"),
        ("stuck", "stuck: the engine has work and has made no step for 61.5 s"),
        ("dead", "dead: the engine died; the server must be restarted; the last step was 61.5 s ago"),
        ("loading", "loading: the model is not ready: weights (3 of 7)"),
    ],
)
def test_of_a_server_that_does_not_go_on_the_state_alone_is_told(fake_server, capsys, state, said):
    engine = fake_server.engine
    engine.state, engine.step_age_s, engine.progress = state, 61.5, (3, 7, "weights")
    assert main(["prog", f"--url={fake_server.url}/"]) == 1
    assert capsys.readouterr() == (f"{fake_server.url} is {said}\n", "")
    assert main(["prog", f"--url={fake_server.url}", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    told = report.pop("state")
    assert told["state"] == state and not told["is_ready"] and said.startswith(f"{state}: {told['reason']}")
    assert not report


def test_a_server_that_drains_is_named_first_and_examined(fake_server, capsys):
    fake_server.engine.state, fake_server.engine.step_age_s = "draining", 61.5
    assert main(["prog", f"--url={fake_server.url}"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{fake_server.url} is draining: the server is shutting down; the last step was 61.5 s ago"
    assert others[0].startswith(f"{fake_server.url}: 0 iterations; ")
    assert main(["prog", f"--url={fake_server.url}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["state"]["state"] == "draining" and report["diagnoses"]


def test_of_a_ready_server_no_state_is_told_but_in_json(fake_server, capsys):
    assert main(["prog", f"--url={fake_server.url}"]) == 0
    assert " is ready" not in capsys.readouterr().out
    assert main(["prog", f"--url={fake_server.url}", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert state == {"state": "ready", "is_ready": True, "reason": "", "step_age_s": None}


def test_an_answer_that_is_not_expected_is_shown_with_its_message(fake_server, capsys):
    assert main(["prog", f"--url={fake_server.url}/elsewhere"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"/elsewhere/metrics answers 404 \(\w.*\); it must answer 200", told), told


def test_a_server_that_guards_its_metrics_is_read_with_a_key(capsys, monkeypatch):
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("a-key", "alice"),), guard_probes=True))
    try:
        for words, said in (
            ((), "an API key is needed; send Authorization: Bearer KEY; set --api_key or JAXSERVE_API_KEY"),
            (("--api_key=other",), "the API key is wrong; set --api_key or JAXSERVE_API_KEY"),
            (("--api_key=a\nkey",), "--api_key has a character that no HTTP header carries"),
        ):
            assert main(["prog", f"--url={server.url}", *words]) == 1
            told = capsys.readouterr().err
            assert said in told and "a\nkey" not in told
        assert main(["prog", f"--url={server.url}", "--api_key=a-key"]) == 0
        monkeypatch.setenv("JAXSERVE_API_KEY", "a-key")
        assert main(["prog", f"--url={server.url}"]) == 0
    finally:
        server.stop()
