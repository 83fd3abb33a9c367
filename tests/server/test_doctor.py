"""The doctor reads a live server's metrics."""

import json

from jaxserve.doctor import main


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
