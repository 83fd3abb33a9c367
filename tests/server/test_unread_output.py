"""Whole programs whose stderr is a full pipe that nobody reads: they serve, and they end as they should."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from jaxserve.faults import ALLOW_VARIABLE
from jaxserve.server.launcher import LAST_EXIT_S
from tests.batch.lines import completion
from tests.server.running import until

SIZES = ("--dtype=float32", "--max_num_seqs=8", "--num_pages=80", "--max_model_len=128", "--decode_buckets=8")
SHAPES = (*SIZES, "--prefill_buckets=16", "--table_width_buckets=8", "--max_num_batched_tokens=16")
BODY = {"prompt": "The sea", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
GRACE_S = 2.0
HANGS = [{"at": "engine.step", "do": "hang", "seconds": 600, "skip": 3, "times": None}]


@pytest.fixture
def full_pipe():
    """The writing end of a pipe that takes no more."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x" * size)
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


@pytest.fixture
def begin(full_pipe):
    """`begin(module, *flags)`: a process with that stderr; ended with the test."""
    processes = []

    def start(*arguments):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=full_pipe,
                text=True,
                env=os.environ | {ALLOW_VARIABLE: "1"},
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.fixture
def serve(begin, tiny_model_dir, compile_cache, tmp_path):
    """`serve(plan, *flags)`: a server under a fault plan; the process and its URL."""

    def start(plan, *flags):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan))
        own = (f"--fault_plan={path}", f"--drain_grace_s={GRACE_S}", "--http_port=0", "--grpc_port=0")
        cache = f"--compile_cache={compile_cache}"
        server = begin("jaxserve.server", f"--model={tiny_model_dir}", *SHAPES, *own, cache, *flags)
        return server, "http://" + dict(word.split("=") for word in first_line(server)[2:])["http"]

    return start


def first_line(process):
    """Words of the line that says that a server is ready."""
    lines = []
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(60)
    assert lines and lines[0].startswith("jaxserve"), "it waits for a reader of its stderr"
    return lines[0].split()


def asked(url):
    """A request, on a thread: what it got."""
    codes = []

    def ask():
        try:
            codes.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code)
        except httpx.TransportError as error:
            codes.append(type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, codes


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_sigterm_ends_a_server_within_its_grace_with_status_0(serve, log_format):
    server, url = serve([], f"--log_format={log_format}", "--log_requests", "--drain_delay_s=0.1")
    assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait(GRACE_S + 10) == 0


def test_a_second_signal_ends_a_server_at_once(serve):
    slow = {"at": "engine.step", "do": "hang", "seconds": 0.5, "times": None}
    server, url = serve([slow], "--drain_grace_s=600")
    _, codes = asked(url)
    until(lambda: httpx.get(f"{url}/load").json()["num_requests_running"] == 1, what="it runs")
    server.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{url}/ready").status_code == 503, what="it drains")
    server.send_signal(signal.SIGTERM)
    assert server.wait(10) == 128 + signal.SIGTERM and not codes[1:]


def test_a_stuck_engine_ends_its_process_with_status_1(serve):
    server, url = serve(HANGS, "--step_timeout_s=1", "--stuck_exit_s=1")
    thread, codes = asked(url)
    assert server.wait(2 * (1 + 0.25) + LAST_EXIT_S + 5) == 1
    thread.join(10)
    assert codes == [503]


def test_a_stuck_engine_ends_a_batch_job_with_status_1(begin, tiny_model_dir, compile_cache, tmp_path):
    lines, plan = tmp_path / "lines.jsonl", tmp_path / "plan.json"
    lines.write_text("".join(json.dumps(completion(str(number), max_tokens=8)) + "\n" for number in range(20)))
    plan.write_text(json.dumps(HANGS))
    files = (f"--input={lines}", f"--output={tmp_path / 'results'}", f"--fault_plan={plan}")
    limits = ("--step_timeout_s=1", "--stuck_exit_s=1", f"--compile_cache={compile_cache}")
    job = begin("jaxserve.batch", f"--model={tiny_model_dir}", *SHAPES, *files, *limits)
    assert job.wait(120) == 1


def test_sigterm_ends_a_router_with_status_0(begin, fake_server):
    router = begin("jaxserve.router", f"--replicas={fake_server.url}", "--http_port=0", "--drain_grace_s=1")
    url = "http://" + first_line(router)[-1].removeprefix("http=")
    fake_server.engine.step_s = 0.5
    thread, codes = asked(url)
    until(lambda: fake_server.engine.live, what="it runs")
    router.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert router.wait(15) == 0 and time.monotonic() - began > 0.5, "it had something to say, and to wait for"
    thread.join(10)
    assert len(codes) == 1
