"""Schemathesis against a running server: requests made from /openapi.json, right ones and wrong ones.

Usage: python tools/clients/schemathesis_check.py http://127.0.0.1:8000 [SECONDS, 60 unless given]
Needs `schemathesis` in the Python that runs it. Exits with 1 if an answer is 5xx or not as described (504 is, of a
deadline that passed), if wrong data is taken, if a request hangs for 60 s, or if the server is not as before
afterwards: the same tokens for the same request, nothing running, no KV page owned. Of a server with keys, one without
a tenant is read from the environment variable JAXSERVE_API_KEY; then requests without it, or with another, must be
refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

LEFT_OUT = {
    "positive_data_acceptance": "rules between fields (stream_options needs stream) are not in the description",
}
CONFIG = Path(__file__).with_name("schemathesis.toml")
KEY = os.environ.get("JAXSERVE_API_KEY")
HEADERS = {"Authorization": f"Bearer {KEY}"} if KEY else {}
BASELINE = {"prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def main(url: str, seconds: int) -> int:
    """The status to exit with."""
    before = baseline(url)
    command = [sys.executable, "-m", "schemathesis.cli", f"--config-file={CONFIG}", "run", f"{url}/openapi.json"]
    command += [f"--header={name}: {value}" for name, value in HEADERS.items()]
    command += ["--checks=all", f"--exclude-checks={','.join(LEFT_OUT)}", "--continue-on-failure"]
    command += ["--exclude-path=/v1/embeddings"]  # 501 for whatever is sent
    command += ["--phases=examples,coverage,fuzzing", "--mode=all", f"--max-time={seconds}", "--seed=1"]
    command += ["--request-timeout=60", "--max-failures=100", "--no-color"]
    status = subprocess.run(command).returncode
    faults = ["schemathesis found faults"] if status else []
    if baseline(url) != before:
        faults.append("the request sent before and after got other tokens")
    faults += unsettled(url)
    print("\n".join(faults) or "the server is as before")
    return 1 if faults else 0


def baseline(url: str) -> list[int]:
    """Token ids of the fixed request."""
    return fetch(f"{url}/v1/completions", BASELINE)["choices"][0]["token_ids"]


def unsettled(url: str) -> list[str]:
    """What still runs or is owned after 30 s."""
    for _ in range(30):
        state = fetch(f"{url}/debug/state")
        live = {name: state[name] for name in ("num_requests_running", "num_requests_waiting") if state[name]}
        if state["kv"]["pages_owned"]:
            live["pages_owned"] = state["kv"]["pages_owned"]
        if not live:
            return []
        time.sleep(1)
    return [f"{name} is {count}" for name, count in live.items()]


def fetch(url: str, body: object = None) -> dict:
    """The JSON answer of a GET, or of a POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | HEADERS)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["http://127.0.0.1:8000"]
    sys.exit(main(arguments[0].rstrip("/"), int(arguments[1]) if len(arguments) > 1 else 60))
