"""A run's or a sweep's figures as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.sim.report import LATENCIES, QUANTILES

_COUNTS = ("offered", "completed", "rejected", "expired", "live", "preemptions")
_SWEEP = (
    ("tokens_per_s", "tokens/s", ".1f"),
    ("requests_per_s", "requests/s", ".3g"),
    ("goodput_requests_per_s", "goodput/s", ".3g"),
    ("slo_share", "met SLO", ".1%"),
    ("ttft_s.p50", "TTFT p50 s", ".3g"),
    ("ttft_s.p99", "TTFT p99 s", ".3g"),
    ("itl_s.p99", "ITL p99 s", ".3g"),
    ("queue_s.p99", "queue p99 s", ".3g"),
    ("slot_utilisation", "slots", ".0%"),
    ("rejected", "rejected", "d"),
    ("preemptions", "preempted", "d"),
)


def print_run(title: str, figures: dict[str, Any]) -> None:
    """One run: counts and latencies per class, then the whole."""
    groups = {"all": figures, **(figures["classes"] if len(figures["classes"]) > 1 else {})}
    requests = _table(f"{title}: requests", ["class", *_COUNTS, "requests/s", "tokens/s", "goodput/s", "met SLO"])
    for name, group in groups.items():
        rates = [_shown(group[key], ".4g") for key in ("requests_per_s", "tokens_per_s", "goodput_requests_per_s")]
        requests.add_row(name, *(str(group[key]) for key in _COUNTS), *rates, _shown(group["slo_share"], ".1%"))
    latencies = _table("seconds", ["class", "", "mean", *QUANTILES, "max"])
    for name, group in groups.items():
        for key in LATENCIES:
            values = [_shown(group[key][column], ".4g") for column in ("mean", *QUANTILES, "max")]
            latencies.add_row(name, key.removesuffix("_s").replace("_", " "), *values)
    console = _console(requests, latencies)
    console.print(requests)
    console.print(latencies)
    console.print(
        f"{figures['iterations']} iterations of {_shown(figures['mean_iteration_s'], '.3g')} s over"
        f" {figures['duration_s']:.4g} s; slots {figures['slot_utilisation']:.1%},"
        f" token budget {figures['budget_utilisation']:.1%}, device busy {_shown(figures['busy_share'], '.1%')};"
        f" {figures['termination']}",
        soft_wrap=True,
    )
    if (split := figures.get("split")) is not None:
        console.print(
            f"{split['prefill_engines']} prefill and {split['decode_engines']} decode engines; prefill busy"
            f" {_shown(split['prefill_busy_share'], '.1%')}, links {_shown(split['link_busy_share'], '.1%')};"
            f" {split['sent_requests']} prompts sent, {split['short_prompts']} short,"
            f" {split['refused_prompts']} refused; transfer p50 {_shown(split['transfer_s']['p50'], '.3g')} s,"
            f" p99 {_shown(split['transfer_s']['p99'], '.3g')} s",
            soft_wrap=True,
        )
    if figures["preemptions"]:
        costs = f"{figures['recomputed_tokens']} tokens computed again, {figures['swapped_pages']} pages swapped"
        console.print(f"preempted: {figures['preemptions']} times; {costs}")
    reasons = {key: count for key, count in figures["rejected_by_reason"].items() if count}
    if reasons:
        console.print("rejected: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()))


def print_fleet(figures: dict[str, Any]) -> None:
    """What the router of several replicas did, behind `print_run`."""
    routed = ", ".join(str(count) for count in figures["requests_routed"])
    choices = ", ".join(f"{count} {reason}" for reason, count in sorted(figures["choices"].items()))
    print(f"replicas: {routed} requests; {choices}; cached {_shown(figures['cached_share'], '.1%')} of prompt tokens")


def print_sweep(title: str, names: Sequence[str], points: Sequence[dict[str, Any]]) -> None:
    """A sweep: one row per point, which begins with its values of `names`."""
    table = _table(title, [*names, *(heading for _, heading, _ in _SWEEP)])
    for point in points:
        labels = [_label(point[name]) for name in names]
        table.add_row(*labels, *(_shown(_at(point["figures"], key), form) for key, _, form in _SWEEP))
    _console(table).print(table)


def _label(value: Any) -> str:
    return _shown(value, ".4g") if value is None or isinstance(value, float) else str(value)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _console(*tables: Table) -> Console:
    # Wide enough for every column whatever the terminal's width: names cut off do not tell points apart.
    widest = max(Console(width=1000).measure(table).maximum for table in tables)
    return Console(width=max(Console().width, widest), highlight=False)


def _at(figures: Any, path: str) -> Any:
    for key in path.split("."):
        figures = figures[key]
    return figures


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
