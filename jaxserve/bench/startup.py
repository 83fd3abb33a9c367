"""`bench startup`: from the command to a server that answers, with and without compiled programs.

The server runs as a user starts it, in a process of its own, the model being on the machine already.
Cold: with an empty compilation cache, once. Warm: with the one the cold start filled, the median of several.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time

from absl.flags import FlagValues

from jaxserve.bench.report import Column, report
from jaxserve.loading import resolve_model

READY = "jaxserve ready"
"""Begins the line a server prints once it answers."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("cold_s", "cold s", ".1f"),
    Column("warm_s", "warm s", ".1f"),
    Column("slowest_warm_s", "slowest warm s", ".1f"),
)


def run(flags: FlagValues) -> None:
    """Starts a server once cold and `runs` times warm per dtype, and reports the seconds."""
    resolve_model(flags.model)
    results = []
    for dtype in flags.dtypes:
        with tempfile.TemporaryDirectory() as cache:
            cold_s = seconds_to_ready(flags.model, dtype, cache)
            warm = [seconds_to_ready(flags.model, dtype, cache) for _ in range(flags.runs)]
        results.append(
            {
                "dtype": dtype,
                "cold_s": cold_s,
                "warm_s": statistics.median(warm),
                "slowest_warm_s": max(warm),
                "warm_runs_s": warm,
            }
        )
    report("startup", {"model": flags.model, "runs": flags.runs}, results, COLUMNS, flags.output)


def seconds_to_ready(model: str, dtype: str, compile_cache: str) -> float:
    """Starts a server on free ports, waits until it answers and ends it.

    Raises:
      RuntimeError: it ended before; its own message is on stderr.
    """
    began = time.perf_counter()
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxserve.server"),
            *(f"--model={model}", f"--dtype={dtype}", f"--compile_cache={compile_cache}"),
            *("--http_port=0", "--grpc_port=0", "--log_level=warning"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith(READY):
                return time.perf_counter() - began
        raise RuntimeError(f"the server ended with {server.wait()} before it was ready")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
