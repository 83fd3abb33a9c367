"""`bench simulation`: how many requests the simulator gets through per second of wall time, and what memory it takes.

One workload, always the same: a chat-like load on 256 slots at about 85% of what they can serve, under a linear cost
model. What a request costs the host grows with its tokens, so the result names them too. Memory is the process's
own peak; run it alone, or an earlier measurement's peak counts. Nothing here loads jax.
"""

from __future__ import annotations

import time
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.report import Column, report
from jaxserve.config import SchedulerConfig
from jaxserve.core import peak_memory_bytes
from jaxserve.sim import LinearCost, Objectives, Simulator, figures, parse_workload

WORKLOAD = {
    "seed": 0,
    "arrivals": {"kind": "poisson", "rate": 100.0},
    "prompt": {"kind": "lognormal", "median": 200, "sigma": 1.0, "max": 2000},
    "output": {"kind": "lognormal", "median": 40, "sigma": 0.8, "max": 500},
}
SLOTS, TOKEN_BUDGET, CHUNK, PAGE_SIZE = 256, 2048, 512, 16
COST = LinearCost(constant_s=0.005, decode_row_s=2e-5, kv_token_s=0.0, prefill_token_s=2e-5, prefill_attention_s=0.0)
"""256 decode rows in 10 ms, and 20 us a prompt token: the order of an 8B model on one accelerator."""

COLUMNS = (
    Column("requests", "requests", "d"),
    Column("output_tokens", "output tokens", "d"),
    Column("iterations", "iterations", "d"),
    Column("wall_s", "wall s", ".1f"),
    Column("requests_per_wall_s", "requests/s", ".0f"),
    Column("tokens_per_wall_s", "tokens/s", ".0f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("grown_mib", "of it the run", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Simulates `simulated_requests` requests once and reports speed and memory."""
    settings = {
        "workload": WORKLOAD | {"num_requests": flags.simulated_requests},
        "slots": SLOTS,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "prefill_chunk": CHUNK,
        "page_size": PAGE_SIZE,
    }
    report("simulation", settings, [measure(flags.simulated_requests)], COLUMNS, flags.output)


def measure(num_requests: int) -> dict[str, Any]:
    """One run, its figures included.

    Returns:
      `wall_s` and `cpu_s`, seconds of the simulation and of its figures; `simulated_s`, seconds that passed in it;
      `peak_mib`, the most memory the process held so far, and `grown_mib`, how much of that is new.
    """
    workload = parse_workload(WORKLOAD | {"num_requests": num_requests}, "bench")
    config = SchedulerConfig(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=TOKEN_BUDGET,
        prefill_chunk=CHUNK,
        page_size=PAGE_SIZE,
        max_model_len=workload.longest,
        num_pages=SLOTS * -(-workload.longest // PAGE_SIZE) + 1,
        max_queue_requests=1000,
    )
    peak_before = peak_mib()
    began, cpu_began = time.perf_counter(), time.process_time()
    found = figures(Simulator(config, COST, workload.source()).run(), Objectives())
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {
        "requests": num_requests,
        **{name: found[name] for name in ("completed", "rejected", "output_tokens", "iterations", "slot_utilisation")},
        "simulated_s": found["duration_s"],
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests_per_wall_s": num_requests / wall_s,
        "tokens_per_wall_s": found["output_tokens"] / wall_s,
        "peak_mib": peak_mib(),
        "grown_mib": peak_mib() - peak_before,
    }


def peak_mib() -> float:
    """The most memory this process has held, MiB."""
    return peak_memory_bytes() / (1 << 20)
