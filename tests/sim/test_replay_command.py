"""`python -m jaxserve.replay`: exit status, what it says, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.replay import main
from jaxserve.simulate import main as simulate
from tests.scheduler.harness import Harness, make_config, make_request
from tests.sim.recording import random_run, write_trace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    harness = random_run(seed=3, lag=1)
    return write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(["prog", *words])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_equal_is_0_and_the_output_is_the_same_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "again.jsonl"
    assert main(["prog", f"--trace={trace}", f"--output={output}"]) == 0
    assert output.read_bytes() == trace.read_bytes()
    records = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    iterations = sum("kind" not in record for record in records)
    requests = sum(event["kind"] == "add" for record in records for event in record["events"])
    assert capsys.readouterr().out.startswith(f"equal: {iterations} iterations, {requests} requests, ")


def test_a_difference_is_1_and_is_shown(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = trace.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if '"iteration":1,' in line)
    record = json.loads(lines[number])
    right = record["pages_free"]
    record["pages_free"] = 999
    lines[number] = json.dumps(record)
    trace.write_text("\n".join(lines) + "\n")
    assert main(["prog", f"--trace={trace}"]) == 1
    wanted = f"first difference: iteration 1 (line {number + 1}), pages_free: recorded 999, replayed {right}\n"
    assert capsys.readouterr().out.startswith(wanted + "equal before it: 1 iterations, ")


def test_a_truncated_trace_is_equal_with_a_note(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(trace.read_bytes()[:-5])
    assert main(["prog", f"--trace={trace}"]) == 0
    lines = len(trace.read_bytes().splitlines())
    assert capsys.readouterr().out.startswith(f"note: line {lines} is cut short, as after a crash; it was left out\n")


def test_plans_without_a_record_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = Harness(make_config(), lag=2)
    harness.add(make_request("a", 4, 9))
    for _ in range(4):
        harness.step()
    path = write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)
    assert main(["prog", f"--trace={path}"]) == 0
    assert capsys.readouterr().out == (
        "equal: 2 iterations, 1 requests, 4 plans\n"
        "2 of the plans were in flight when the trace ended and have no record to compare\n"
    )


def test_mistakes_and_damage_are_named(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trace is missing" in refusal(capsys)
    before = trace.read_bytes()
    beside = trace.parent / "." / "x" / ".." / trace.name
    assert "write to another file" in refusal(capsys, f"--trace={trace}", f"--output={beside}")
    assert "write to another file" in refusal(capsys, f"--trace={trace}", "--output=a", "--perfetto=a")
    assert trace.read_bytes() == before
    assert "No such file" in refusal(capsys, f"--trace={tmp_path}/none")
    assert f"{tmp_path}/no/x" in refusal(capsys, f"--trace={trace}", f"--output={tmp_path}/no/x")
    trace.write_text(trace.read_text() + "{}\n")
    assert "iteration is missing; it must be an integer" in refusal(capsys, f"--trace={trace}")


def test_it_runs_as_a_program_without_jax_in_any_hash_order(trace: Path, tmp_path: Path) -> None:
    for seed in ("0", "1", "2"):
        output = tmp_path / f"again.{seed}"
        script = (
            "import sys; from jaxserve.replay import main\n"
            f"status = main(['prog', '--trace={trace}', '--output={output}'])\n"
            "print(status, 'jax' in sys.modules)"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stdout.splitlines()[-1:] == ["0 False"], done.stderr
        assert output.read_bytes() == trace.read_bytes()
    done = subprocess.run([sys.executable, "-m", "jaxserve.replay"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, "--trace is missing" in done.stderr) == (2, True)


def test_the_trace_of_a_simulation_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a prefix cache, pages that run out, and a step in flight."""
    workload, trace, output = tmp_path / "workload.json", tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    prompt = {"kind": "uniform", "low": 40, "high": 90}
    kind = {"name": "a", "share": 1.0, "prompt": prompt, "output": {"kind": "exponential", "mean": 20, "max": 60}}
    kind["shared_prefix"] = {"tokens": 32, "groups": 2}
    arrivals = {"kind": "poisson", "rate": 1.0}
    content = {"name": "w", "num_requests": 60, "seed": 1, "arrivals": arrivals, "classes": [kind]}
    workload.write_text(json.dumps(content))
    settings = ["--max_num_seqs=16", "--num_pages=14", "--max_steps_ahead=1", "--enable_prefix_caching"]
    settings += ["--reservation=optimistic", "--preemption=recompute"]
    with pytest.raises(SystemExit, match="0"):
        simulate(["prog", f"--workload={workload}", f"--trace_file={trace}", *settings])
    text = trace.read_text()
    assert '"preempted":["' in text and '"pages":[0' in text
    assert main(["prog", f"--trace={trace}", f"--output={output}"]) == 0
    assert output.read_text() == text and "equal: " in capsys.readouterr().out
