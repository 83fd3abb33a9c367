"""Command line tools whose reader has seen enough end quietly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.readerless import run_for_nobody
from tests.sim.recording import random_run, write_trace

COMMANDS = {
    "doctor": ("doctor", "--trace=TRACE"),
    "doctor --json": ("doctor", "--trace=TRACE", "--json"),
    "replay": ("replay", "--trace=TRACE"),
    "simulate a workload": ("simulate", "--workload=configs/workloads/w1.json"),
    "simulate a scenario": ("simulate", "--scenario=configs/scenarios/three_classes.json"),
    "plan": ("plan", "--model_config=configs/models/llama-3.1-8b.json", "--target=v5e-8", "--nocompile"),
    "plan --json": (
        "plan",
        "--model_config=configs/models/llama-3.1-8b.json",
        "--target=v5e-8",
        "--nocompile",
        "--json",
    ),
    "--version": ("doctor", "--version"),
    "--help": ("simulate", "--help"),
}


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_gets_no_traceback(tmp_path: Path, name: str, buffered: bool) -> None:
    harness = random_run(seed=3, lag=1)
    trace = write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)
    command, *words = (word.replace("TRACE", str(trace)) for word in COMMANDS[name])
    status, told = run_for_nobody("-m", f"jaxserve.{command}", *words, buffered=buffered)
    assert (status, told) == (0 if name == "--help" else 1, "")


FAILS = """
from jaxserve.config.command import run_command
def main(argv):
    raise BrokenPipeError(32, "of a socket")
run_command(main)
"""
ENDS = "from jaxserve.config.command import run_command\nrun_command(lambda argv: print('x') or int(argv[1]))"


def test_another_broken_pipe_is_a_fault_like_any_other() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: [Errno 32] of a socket\n")


@pytest.mark.parametrize("status", [0, 3])
def test_the_process_ends_with_the_status_that_is_returned(status: int) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, str(status)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "x\n", "")
    closed = subprocess.run(["bash", "-c", '"$0" "$@" >&-', sys.executable, "-c", ENDS, str(status)])
    assert closed.returncode == status, "also without a stdout"
