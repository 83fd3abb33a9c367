"""`bench serve`: an open-loop load on a server with OpenAI's API: latencies, throughput, refusals, goodput.

Any such server will do, so peers are measured by the same client. Requests come at their own instants, whatever the
server does with those before. Every setting (a rate, or the workload's own arrivals) runs several times; its row has
medians over the runs. The client's own processor time per token is among the figures: it shares the machine.
"""

from __future__ import annotations

from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.load.figures import medians
from jaxserve.bench.load.record import Record
from jaxserve.bench.load.requests import W3_FACTORS, Load, read_load
from jaxserve.bench.load.target import Target, check_server_flags, open_target
from jaxserve.bench.report import Column, MeasurementError, report
from jaxserve.sim.plots import require_matplotlib

COLUMNS = (
    Column("rate", "rate", ".3g"),
    Column("requests_per_s", "requests/s", ".2f"),
    Column("output_tokens_per_s", "tokens/s", ".1f"),
    Column("ttft_ms.p50", "TTFT ms p50", ".0f"),
    Column("ttft_ms.p99", "p99", ".0f"),
    Column("itl_ms.p50", "ITL ms p50", ".1f"),
    Column("itl_ms.p99", "p99", ".0f"),
    Column("tpot_ms.p50", "TPOT ms p50", ".1f"),
    Column("e2e_ms.p50", "e2e ms p50", ".0f"),
    Column("refused", "refused", ".0f"),
    Column("failed", "failed", ".0f"),
    Column("slo_share", "met SLO", ".1%"),
    Column("client_us_per_token", "client us/token", ".0f"),
)
SETTINGS = (
    *("workload", "num_requests", "prompt_lengths", "output_lengths", "prompt_tokens", "output_tokens", "seed"),
    *("arrivals", "rates", "cv", "ramp_to", "factors", "long_prompt_every", "long_prompt_tokens", "warmup_requests"),
    *("return_token_ids", "slo_ttft_ms", "slo_itl_ms", "slo_tpot_ms", "runs"),
)


def run(flags: FlagValues) -> None:
    """Runs the load at every setting and reports.

    Raises:
      ValueError: a flag or the workload breaks a rule.
    """
    check_server_flags(flags)
    if flags.capacity is not None and not (flags.factors or flags.workload == "w3"):
        raise ValueError("capacity is given without factors of it")
    if flags.plots:
        require_matplotlib()
    load = read_load(flags)
    with open_target(flags, flags.url, flags.server) as target:
        results, records = measure(target, load, flags)
    settings = {name: flags[name].value for name in SETTINGS}
    report("serve", settings | {"url": target.url, "served_model": target.model}, results, COLUMNS, flags.output)
    for result in results:
        for error, count in result["errors"].items():
            print(f"{count} failed: {error}")
        if result["short_outputs"]:
            print(
                f"{result['short_outputs']:g} outputs were shorter than asked for: is ignore_eos known to the server?"
            )
    if flags.plots:
        from jaxserve.bench.load.plots import draw

        draw(results, records, flags.plots, flags.plot_format)


def measure(target: Target, load: Load, flags: FlagValues) -> tuple[list[dict[str, Any]], list[list[list[Record]]]]:
    """A result per setting, medians over its runs, with the runs' own figures; and the records of each."""
    number = 0
    factors = flags.factors
    if flags.workload == "w3" and not (factors or flags.rates or load.kind == "batch"):
        factors = W3_FACTORS
    capacity = flags.capacity
    results: list[dict[str, Any]] = []
    records: list[list[list[Record]]] = []
    if factors and capacity is None:
        target.warm_up(load, flags.warmup_requests, number)
        found, sent = target.run(load.run(number, kind="batch"))
        number += 1
        capacity = found["requests_per_s"]
        if not capacity:
            raise MeasurementError("no request completed in the run that measures the capacity")
        results.append({"rate": None, "factor": None} | found | {"runs": [found]})
        records.append([sent])
    rates = flags.rates or ([factor * capacity for factor in factors] if factors else [None])
    for index, rate in enumerate(rates):
        target.warm_up(load, flags.warmup_requests, number)
        runs, sent = [], []
        for _ in range(flags.runs):
            found, of_run = target.run(load.run(number, rate))
            number += 1
            runs.append(found)
            sent.append(of_run)
        results.append({"rate": rate, "factor": factors[index] if factors else None} | medians(runs) | {"runs": runs})
        records.append(sent)
    return results, records
