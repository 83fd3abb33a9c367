"""`bench compare`: one load on two servers in turns, A B A B, so that a change in the machine's speed meets both.

Each pair of runs gives a ratio; the median over pairs is reported with quartiles and extremes, beside each server's
own median. Both servers are up all the time, the idle one costing nothing; where memory is too little for two,
`--one_at_a_time` starts one for each run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.load.figures import medians
from jaxserve.bench.load.requests import read_load
from jaxserve.bench.load.target import Target, check_url, open_target
from jaxserve.bench.report import Column, report
from jaxserve.bench.serve import SETTINGS

FIGURES = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "ttft_ms.p50": "TTFT ms p50",
    "ttft_ms.p99": "TTFT ms p99",
    "itl_ms.p50": "ITL ms p50",
    "itl_ms.p99": "ITL ms p99",
    "tpot_ms.p50": "TPOT ms p50",
    "e2e_ms.p50": "e2e ms p50",
    "slo_share": "met SLO",
}
COLUMNS = (
    Column("heading", "figure"),
    Column("a", "A", ".4g"),
    Column("b", "B", ".4g"),
    Column("ratio_b_over_a", "B / A", ".3f"),
    Column("first_quartile", "1st quartile", ".3f"),
    Column("third_quartile", "3rd quartile", ".3f"),
    Column("least", "least", ".3f"),
    Column("largest", "largest", ".3f"),
)


def run(flags: FlagValues) -> None:
    """Runs the pairs and reports.

    Raises:
      ValueError: a flag or the workload breaks a rule.
    """
    sides = {name: (flags[f"{name}_url"].value, flags[name].value) for name in ("a", "b")}
    for name, (url, command) in sides.items():
        if (url is None) == (command is None):
            raise ValueError(f"give {name}, flags or a command that start a server, or {name}_url of a running one")
        if url is not None:
            check_url(f"{name}_url", url)
    if flags.factors or len(flags.rates or ()) > 1:
        raise ValueError("compare runs one setting: give no factors and at most one of rates")
    load = read_load(flags)
    rate = flags.rates[0] if flags.rates else None
    if rate is None and load.kind not in (None, "batch"):
        raise ValueError(f"arrivals of {flags.workload} are {load.kind}; say how fast they come with rates")
    runs: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    with ExitStack() as stack:
        kept: dict[str, Target] = {}
        if not flags.one_at_a_time:
            for name, (url, command) in sides.items():
                kept[name] = stack.enter_context(open_target(flags, url, command))
                kept[name].warm_up(load, flags.warmup_requests, 0)
        for number in range(flags.pairs):
            for name, (url, command) in sides.items():
                if name in kept:
                    found, _ = kept[name].run(load.run(number, rate))
                else:
                    with open_target(flags, url, command) as target:
                        target.warm_up(load, flags.warmup_requests, number)
                        found, _ = target.run(load.run(number, rate))
                runs[name].append(found)
    settings = {name: flags[name].value for name in (*SETTINGS, "a", "b", "a_url", "b_url", "pairs", "one_at_a_time")}
    del settings["runs"]
    more = {"a": medians(runs["a"]) | {"runs": runs["a"]}, "b": medians(runs["b"]) | {"runs": runs["b"]}}
    report("compare", settings, ratios(runs["a"], runs["b"]), COLUMNS, flags.output, more=more)


def ratios(of_a: Sequence[dict[str, Any]], of_b: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per figure: medians of both, and of their ratio pair by pair median, quartiles and extremes.

    Args:
      of_a, of_b: figures of the runs, pair by pair; two pairs or more.
    """
    rows = []
    for key, heading in FIGURES.items():
        pairs = [(_value(a, key), _value(b, key)) for a, b in zip(of_a, of_b, strict=True)]
        whole = [(a, b) for a, b in pairs if a is not None and b is not None]
        quotients = [b / a for a, b in whole if a]
        spread = statistics.quantiles(quotients, n=4, method="inclusive") if len(quotients) > 1 else [None] * 3
        rows.append(
            {
                "figure": key,
                "heading": heading,
                "a": statistics.median(a for a, _ in whole) if whole else None,
                "b": statistics.median(b for _, b in whole) if whole else None,
                "ratio_b_over_a": spread[1],
                "first_quartile": spread[0],
                "third_quartile": spread[2],
                "least": min(quotients, default=None),
                "largest": max(quotients, default=None),
                "pairs": len(quotients),
            }
        )
    return rows


def _value(figures: dict[str, Any], key: str) -> float | None:
    value: Any = figures
    for part in key.split("."):
        value = value[part]
    return value  # type: ignore[no-any-return]
