"""The Ray Serve application, as its configuration starts it, on a Ray of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "deploy" / "ray_serve"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray: pip install 'ray[serve]'"),
]

TINY = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_pages": 80,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "table_width_buckets": [8],
}


@pytest.fixture(scope="module")
def served(tiny_model_dir, compile_cache, tmp_path_factory):
    """`serve run` on the shipped configuration with the tiny model; the URL, and the log."""
    config = yaml.safe_load((FOLDER / "serve_config.yaml").read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = config["http_options"]["port"] = free.getsockname()[1]
    engine = config["applications"][0]["args"]["engine"]
    engine |= TINY | {"model": str(tiny_model_dir), "compile_cache": compile_cache}
    folder = tmp_path_factory.mktemp("ray")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[2]), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    words = [str(Path(sys.executable).with_name("serve")), "run", "--app-dir", str(FOLDER), str(folder / "config.yaml")]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until_answered(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def until_answered(url, process, log):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        failed = "failed with exception" in log.read_text() or "DEPLOY_FAILED" in log.read_text()
        assert process.poll() is None and not failed, log.read_text()[-4000:]
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(f"not ready: {log.read_text()[-4000:]}")


def test_both_replicas_answer_the_openai_client_whole_and_streamed(served):
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == ["tiny"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**chat).choices[0].message.content

    def streamed(_):
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert len(chunks) > 2, "the stream came in one piece"
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(streamed, range(24))) == {whole}
    # Each replica has metrics of its own: over many readings both show up.
    counts = {
        line.rpartition(" ")[2]
        for _ in range(40)
        for line in httpx.get(f"{served}/metrics").text.splitlines()
        if line.startswith("jaxserve:startup_seconds") and "weights" in line
    }
    assert len(counts) == 2, f"one replica answers everything: {counts}"
    client.close()


def test_errors_are_the_server_s_own(served):
    answer = httpx.post(f"{served}/v1/completions", json={"model": "other", "prompt": "a"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_client_that_leaves_aborts_its_request(served):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=served) as client:
        for _ in range(4):
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_raw())
    end = time.monotonic() + 30
    while any(httpx.get(f"{served}/load").json()["server_load"] for _ in range(6)):
        assert time.monotonic() < end, "requests of clients that left still run"
        time.sleep(0.2)
