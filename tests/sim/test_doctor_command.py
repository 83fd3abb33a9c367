"""`python -m jaxserve.doctor`: what it prints of a trace and of a server, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.doctor import main
from jaxserve.sim.diagnoses import diagnose
from jaxserve.sim.metrics_summary import summary_of_metrics
from tests.scheduler.harness import make_request
from tests.sim.clocked import Arrival, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A run on two slots that cannot keep pace."""
    arrivals = [Arrival(0.05 * index, make_request(f"r{index}", 40, 20)) for index in range(60)]
    return run(arrivals, tmp_path / "trace.jsonl", SchedulerConfig(max_num_seqs=2))


def unreadable(capsys: pytest.CaptureFixture[str], url: str) -> str:
    """What is said of a server that cannot be read: one line."""
    assert main(["prog", f"--url={url}"]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    return err


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(["prog", *words])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_it_prints_figures_diagnoses_and_flags(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prog", f"--trace={trace}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{trace}: ") and lines[0].endswith("requests: 60 offered, 60 completed")
    assert [line.split()[0] for line in lines[1:6]] == ["TTFT", "queue", "prefill", "ITL", "end"]
    found = lines.index("ttft_queueing: The slowest first tokens waited in the queue for a slot.")
    assert any(line.split()[0] == "queue_share_of_slowest" for line in lines[found + 1 :])
    assert "  try: --max_num_seqs --max_num_batched_tokens --max_queue_requests" in lines[found:]


def test_json_holds_the_same(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prog", f"--trace={trace}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["offered"] == 60 and report["summary"]["ttft_s"]["count"] == 60
    (diagnosis,) = report["diagnoses"]
    assert diagnosis["name"] == "ttft_queueing" and "max_num_seqs" in diagnosis["flags"]
    assert diagnosis["figures"]["queue_share_of_slowest"] > 0.9


def dumped(trace: Path, error: str) -> Path:
    """The trace as an engine leaves it that has died."""
    header, *records = trace.read_text().splitlines(keepends=True)
    trace.write_text(json.dumps(json.loads(header) | {"died": {"error": error}}) + "\n" + "".join(records))
    return trace


def test_of_an_engine_that_died_the_death_comes_first(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped(trace, "XlaRuntimeError: INTERNAL: broken\nsecond line")
    assert main(["prog", f"--trace={trace}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("died: The engine died of XlaRuntimeError: INTERNAL: broken\n  The traceback is in")
    assert "second line" not in out and out.count("The engine died") == 1
    assert out.index("60 offered") < out.index("\n\nttft_queueing: "), "the rest is as of any trace"
    assert main(["prog", f"--trace={trace}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["died_of"] == "XlaRuntimeError: INTERNAL: broken"
    assert [each["name"] for each in report["diagnoses"]] == ["died", "ttft_queueing"]


@pytest.mark.parametrize("num_requests", [0, 3])
def test_an_engine_that_died_was_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_requests: int
) -> None:
    arrivals = [Arrival(9.0 * index, make_request(f"r{index}", 4, 5)) for index in range(num_requests)]
    trace = run(arrivals, tmp_path / "trace.jsonl", SchedulerConfig(max_num_seqs=2))
    assert main(["prog", f"--trace={trace}"]) == 0
    assert ("healthy: " if num_requests else "no_data: ") in capsys.readouterr().out
    dumped(trace, "OSError: x")
    assert main(["prog", f"--trace={trace}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("died: The engine died of OSError: x\n")
    assert "healthy" not in out and "othing to do" not in out and "no_data" not in out


def test_mistakes_are_named(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one of --trace and --url" in refusal(capsys)
    assert "give one of --trace and --url" in refusal(capsys, f"--trace={trace}", "--url=http://127.0.0.1:1")
    assert "No such file" in refusal(capsys, f"--trace={tmp_path}/none")
    assert "--url is '127.0.0.1:8000'; it must begin with http://" in unreadable(capsys, "127.0.0.1:8000")
    assert "does not answer: " in unreadable(capsys, "http://127.0.0.1:1")
    trace.write_text("{}\n")
    assert "line 1: kind is missing" in refusal(capsys, f"--trace={trace}")


def histogram(name: str, counts: dict[str, int]) -> str:
    """A histogram's exposition from cumulative counts by bound."""
    labels = 'engine="0",model_name="tiny"'
    return "".join(f'jaxserve:{name}_bucket{{{labels},le="{bound}"}} {n}.0\n' for bound, n in counts.items())


METRICS = (
    "# HELP jaxserve:num_requests_running Requests with a slot.\n"
    'jaxserve:num_requests_running{engine="0",model_name="a } b"} 3.0\n'
    'jaxserve:num_requests_waiting{engine="0",model_name="tiny"} 5.0\n'
    'jaxserve:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.97\n'
    'jaxserve:num_preemptions_total{engine="0",model_name="tiny"} 2.0\n'
    'jaxserve:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 60.0\n'
    'jaxserve:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 30.0\n'
    'jaxserve:request_success_total{engine="0",finished_reason="expired",model_name="tiny"} 2.0\n'
    'jaxserve:requests_rejected_total{engine="0",reason="queue_full_requests",model_name="tiny"} 10.0\n'
    'jaxserve:requests_rejected_total{engine="0",reason="draining",model_name="tiny"} 0.0\n'
    "process_cpu_seconds_total 7.5\n"
    + histogram("time_to_first_token_seconds", {"0.1": 0, "0.5": 50, "1.0": 100, "+Inf": 100})
    + histogram("request_queue_time_seconds", {"0.1": 40, "0.5": 80, "1.0": 100, "+Inf": 100})
    + histogram("inter_token_latency_seconds", {"0.01": 0, "0.02": 900, "0.5": 900, "1.0": 1000, "+Inf": 1000})
)


def test_metrics_become_a_summary_with_interpolated_quantiles() -> None:
    summary = summary_of_metrics(METRICS, "http://s")
    assert (summary.offered, summary.rejected) == (110, {"queue_full_requests": 10})
    assert summary.ended == {"completed": 90, "aborted": 0, "expired": 2, "failed": 0}
    assert (summary.waiting, summary.kv_usage, summary.preemptions) == (5, 0.97, 2)
    assert summary.ttft_s is not None and summary.queue_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.p50, summary.ttft_s.p95) == (100, 0.5, pytest.approx(0.95))
    assert summary.queue_s.p50 == pytest.approx(0.2) and summary.queue_s.max == 1.0
    assert summary.e2e_s is None and summary.stall_causes is None
    names = [diagnosis.name for diagnosis in diagnose(summary)]
    assert names == ["kv_pressure", "ttft_queueing", "itl_tail", "rejections"]


def test_a_quiet_server_is_healthy_and_another_service_is_refused() -> None:
    quiet = METRICS.replace("0.97", "0.2").replace("} 10.0\n", "} 0.0\n").replace("} 2.0\n", "} 0.0\n")
    quiet = quiet.replace("} 900.0\n", "} 1000.0\n").replace("} 40.0\n", "} 100.0\n").replace("} 80.0\n", "} 100.0\n")
    assert [diagnosis.name for diagnosis in diagnose(summary_of_metrics(quiet, "http://s"))] == ["healthy"]
    with pytest.raises(ValueError, match=r"http://s exports no metric named jaxserve:\*"):
        summary_of_metrics("process_cpu_seconds_total 7.5\n", "http://s")


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A server that answers /metrics with `METRICS`, and anything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_for_its_metrics(metrics_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prog", f"--url={metrics_url}/"]) == 0
    out = capsys.readouterr().out
    assert "110 offered, 90 completed, 2 expired, 10 refused" in out
    assert "kv_pressure: " in out and "kv_usage" in out and "try: --memory_fraction" in out
    assert "answers 404; it must answer 200" in unreadable(capsys, f"{metrics_url}/elsewhere")


def test_it_runs_without_jax(trace: Path) -> None:
    script = (
        "import sys; from jaxserve.doctor import main\n"
        f"status = main(['prog', '--trace={trace}', '--json'])\n"
        "print(status, 'jax' in sys.modules, file=sys.stderr)"
    )
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stderr == "0 False\n"
        outputs.add(done.stdout)
    assert len(outputs) == 1
