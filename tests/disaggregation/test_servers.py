"""Two server processes, as an operator starts them: what clients get, what metrics and traces tell; then a kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import AddEvent
from jaxserve.sim.replayer import replay
from tests.server.running import metric_samples

ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "num_pages": 100,
    "decode_buckets": "4",
    "prefill_buckets": "64",
    "table_width_buckets": "16",
    "compile_cache": "",
}
TEXT = "The quick brown fox jumps over the lazy dog, and over the sea and the sky and all that lies between, "


class Process:
    """A server."""

    def __init__(self, model: str, trace: Path, token: Path, **flags: Any) -> None:
        words = ARGUMENTS | flags | {"model": model, "trace_file": trace, "kv_token_file": token}
        words |= {"http_port": 0, "grpc_port": 0}
        self.trace = trace
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.server", *(f"--{name}={value}" for name, value in words.items())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def ready(self) -> dict[str, str]:
        """Waits for it; its addresses."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:2] == ["jaxserve", "ready"], line
        self.addresses = dict(word.split("=") for word in line[2:])
        return self.addresses

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and its last label where it has a reason."""
        text = httpx.get(f"http://{self.addresses['http']}/metrics", timeout=60).text
        samples = {}
        for name, value in metric_samples(text):
            _, _, reason = name.partition('reason="')
            samples[name.partition("{")[0] + (":" + reason.partition('"')[0] if reason else "")] = value
        return samples

    def complete(self, prompt: str, **fields: Any) -> list[int]:
        """Token ids of a greedy completion."""
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        response = httpx.post(f"http://{self.addresses['http']}/v1/completions", json=body | fields, timeout=120)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids


@pytest.fixture(scope="module")
def servers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    """A prefill and a decode server; the first is dead at the end."""
    folder = tmp_path_factory.mktemp("servers")
    token = folder / "token"
    token.write_text("a token that both servers share\n")
    model = str(tiny_model_dir)
    prefill = Process(model, folder / "prefill.jsonl", token, disaggregation="prefill", kv_port=0)
    workers = prefill.ready()["kv"]
    decode = Process(
        model,
        folder / "decode.jsonl",
        token,
        disaggregation="decode",
        prefill_workers=workers,
        remote_prefill_min_tokens=32,
    )
    decode.ready()
    yield prefill, decode
    for server in (prefill, decode):
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
        server.process.wait(60)
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path) -> LLM:
    """One engine that does everything."""
    settings = {name: value for name, value in ARGUMENTS.items() if not name.endswith("_buckets")}
    buckets = {"decode_buckets": (4,), "prefill_buckets": (64,), "table_width_buckets": (16,)}
    return LLM(str(tiny_model_dir), **settings, **buckets)


def test_ids_are_those_of_one_engine_and_both_sides_tell_of_it(servers: tuple[Process, Process], alone: LLM) -> None:
    prefill, decode = servers
    texts = [f"{number}. {TEXT}" for number in range(3)] + ["short"]
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in alone.generate(texts, greedy)]
    assert [decode.complete(text, request_id=f"r{number}") for number, text in enumerate(texts)] == expected
    metrics, others = decode.metrics(), prefill.metrics()
    assert metrics["jaxserve:kv_transfer_pulls_total"] == 3 == others["jaxserve:kv_export_served_total"]
    assert metrics["jaxserve:kv_transfer_bytes_total"] == others["jaxserve:kv_export_bytes_total"] > 0
    assert metrics["jaxserve:local_prefills_total:short"] == 1
    assert metrics["jaxserve:compiles_total"] > 0
    # One id on both sides.
    ids = [
        [
            each.request_id
            for record in TraceReader(server.trace)
            for each in record.events
            if isinstance(each, AddEvent)
        ]
        for server in servers
    ]
    assert ids == [["r0", "r1", "r2"], ["r0", "r1", "r2", "r3"]]


def test_a_killed_prefill_server_costs_no_client_an_answer(servers: tuple[Process, Process], alone: LLM) -> None:
    """Runs last: the prefill server is dead afterwards."""
    prefill, decode = servers
    texts = [f"{number} more. {TEXT}" for number in range(2)]
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in alone.generate(texts, greedy)]
    prefill.process.kill()
    prefill.process.wait(60)
    assert [decode.complete(text) for text in texts] == expected
    metrics = decode.metrics()
    # The second does not ask it, unless it was left alone for a while already.
    local = {reason: metrics[f"jaxserve:local_prefills_total:{reason}"] for reason in ("unreachable", "no_worker")}
    assert sum(local.values()) == 2 and local["unreachable"] >= 1
    assert metrics["jaxserve:kv_transfer_failures_total:unreachable"] == local["unreachable"]
    decode.process.terminate()
    assert decode.process.wait(120) == 0
    for server in servers:
        report = replay(TraceReader(server.trace))
        assert report.difference is None, str(report.difference)
