"""`bench startup`: from the command to a server that answers, with and without compiled programs.

The server runs as a user starts it, in a process of its own, the model being on the machine already.
Cold: with an empty compilation cache, once. Warm: with the one the cold start filled, the median of several. The
server's own metrics tell what of it weights and programs took, and the most memory it held until then.
"""

from __future__ import annotations

import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from urllib.request import urlopen

from absl.flags import FlagValues
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.report import Column, report
from jaxserve.loading import model_config_of, resolve_model
from jaxserve.models import weights

READY = "jaxserve ready"
"""Begins the line a server prints once it answers."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

COLUMNS = (
    Column("dtype", "dtype"),
    Column("cold.ready_s", "cold s", ".1f"),
    Column("cold.programs_s", "of it programs", ".1f"),
    Column("warm.ready_s", "warm s", ".1f"),
    Column("slowest_warm_s", "slowest", ".1f"),
    Column("warm.weights_s", "of it weights", ".2f"),
    Column("warm.programs_s", "programs", ".1f"),
    Column("weights_mib", "weights MiB", ".0f"),
    Column("warm.weights_peak_mib", "peak MiB with them", ".0f"),
    Column("warm.peak_mib", "peak MiB, warm", ".0f"),
    Column("cold.peak_mib", "cold", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Starts a server once cold and `runs` times warm per dtype, and reports the seconds and memory."""
    config = model_config_of(resolve_model(flags.model))
    results = []
    for dtype in flags.dtypes:
        with tempfile.TemporaryDirectory() as cache:
            cold = start(flags.model, dtype, cache)
            warm = [start(flags.model, dtype, cache) for _ in range(flags.runs)]
        seconds = [each["ready_s"] for each in warm]
        results.append(
            {
                "dtype": dtype,
                "weights_mib": sum(math.prod(weight.shape) for weight in weights(config)) * _ITEM_BYTES[dtype] / 2**20,
                "cold": cold,
                "warm": {key: statistics.median(each[key] for each in warm) for key in cold},
                "cold_s": cold["ready_s"],
                "warm_s": statistics.median(seconds),
                "slowest_warm_s": max(seconds),
                "warm_runs_s": seconds,
            }
        )
    report("startup", {"model": flags.model, "runs": flags.runs}, results, COLUMNS, flags.output)


def start(model: str, dtype: str, compile_cache: str, *more: str) -> dict[str, float]:
    """Starts a server on free ports, waits until it answers and ends it.

    Args:
      more: flags of the server.

    Returns:
      `ready_s`, from the command on; `weights_s` and `programs_s` of that, and `weights_peak_mib` and `peak_mib`, the
      most memory when the weights and when the programs were there.

    Raises:
      RuntimeError: it ended before; its own message is on stderr.
    """
    began = time.perf_counter()
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxserve.server"),
            *(f"--model={model}", f"--dtype={dtype}", f"--compile_cache={compile_cache}"),
            *("--http_port=0", "--grpc_port=0", "--log_level=warning", *more),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith(READY):
                ready_s = time.perf_counter() - began
                address = dict(word.split("=") for word in line.split()[2:])["http"]
                with urlopen(f"http://{address}/metrics", timeout=60) as answer:
                    return {"ready_s": ready_s, **startup_figures(answer.read().decode())}
        raise RuntimeError(f"the server ended with {server.wait()} before it was ready")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def startup_figures(metrics: str) -> dict[str, float]:
    """What a server's metrics say of its start; see `start`."""
    found = {
        (sample.name, sample.labels["stage"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if "stage" in sample.labels
    }
    return {
        "weights_s": found["jaxserve:startup_seconds", "weights"],
        "programs_s": found["jaxserve:startup_seconds", "programs"],
        "weights_peak_mib": found["jaxserve:startup_peak_memory_bytes", "weights"] / 2**20,
        "peak_mib": found["jaxserve:startup_peak_memory_bytes", "programs"] / 2**20,
    }
