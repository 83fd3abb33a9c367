"""`bench overload`: what a server does with several times the requests it can serve: goodput, latencies, refusals.

As `bench serve --factors`, but every setting lasts equally long: `--num_requests` are of capacity, twice as many come
at twice the rate. A refusal counts from the instant its request was due, so what the client is late by is in it; `late`
tells how much. Objectives (`--slo_*`) are of what was admitted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.load.figures import medians
from jaxserve.bench.load.requests import read_load
from jaxserve.bench.load.target import Target, check_server_flags, open_target
from jaxserve.bench.report import Column, MeasurementError, report

FACTORS = (1.0, 2.0, 5.0, 20.0)
COLUMNS = (
    Column("factor", "x capacity", ".3g"),
    Column("rate", "rate", ".3g"),
    Column("offered", "offered", ".0f"),
    Column("completed", "completed", ".0f"),
    Column("requests_per_s", "requests/s", ".1f"),
    Column("goodput_requests_per_s", "goodput/s", ".1f"),
    Column("ttft_ms.p50", "TTFT ms p50", ".0f"),
    Column("ttft_ms.p99", "p99", ".0f"),
    Column("itl_ms.p50", "ITL ms p50", ".1f"),
    Column("itl_ms.p99", "p99", ".0f"),
    Column("refused", "refused", ".0f"),
    Column("refusal_ms.p50", "refusal ms p50", ".1f"),
    Column("refusal_ms.p99", "p99", ".0f"),
    Column("failed", "failed", ".0f"),
    Column("late_ms.p99", "late ms p99", ".1f"),
    Column("client_cpu_share", "client CPU", ".0%"),
)
SETTINGS = (
    *("num_requests", "prompt_lengths", "output_lengths", "prompt_tokens", "output_tokens", "seed", "workload"),
    *("slo_ttft_ms", "slo_itl_ms", "slo_tpot_ms", "runs", "warmup_requests"),
)


def run(flags: FlagValues) -> None:
    """Measures every factor and reports.

    Raises:
      ValueError: a flag or the workload breaks a rule.
    """
    check_server_flags(flags)
    with open_target(flags, flags.url, flags.server) as target:
        results = measure(target, flags)
    settings = {name: flags[name].value for name in SETTINGS}
    report("overload", settings | {"url": target.url, "served_model": target.model}, results, COLUMNS, flags.output)
    for result in results:
        for error, count in result["errors"].items():
            print(f"{count} failed: {error}")


def measure(target: Target, flags: FlagValues) -> list[dict[str, Any]]:
    """A result per factor, medians over its runs."""
    load = replace(read_load(flags), kind="poisson")
    capacity = flags.capacity
    if capacity is None:
        target.warm_up(load, flags.warmup_requests, 0)
        found, _ = target.run(load.run(0, kind="batch"))
        capacity = found["requests_per_s"]
        if not capacity:
            raise MeasurementError("no request completed in the run that measures the capacity")
    results, number = [], 1
    for factor in flags.factors or FACTORS:
        of_factor = replace(load, num_requests=max(round(load.num_requests * factor), 1))
        target.warm_up(load, flags.warmup_requests, number)
        runs = []
        for _ in range(flags.runs):
            found, _ = target.run(of_factor.run(number, factor * capacity))
            share = found["client_us_per_token"] * max(found["output_tokens"], 1) / 1e6 / found["duration_s"]
            runs.append(found | {"client_cpu_share": share})
            number += 1
        results.append({"factor": factor, "rate": factor * capacity} | medians(runs) | {"runs": runs})
    return results
