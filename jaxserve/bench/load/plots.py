"""Plots of a load: latency distributions, latency by arrival, and throughput against the offered rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.load.record import COMPLETED, REFUSED, Record
from jaxserve.sim.plots import new_figure, save_figure

Runs = Sequence[Sequence[Record]]
"""The records of one setting, run by run."""


def draw(results: Sequence[dict[str, Any]], records: Sequence[Runs], folder: str, form: str) -> list[Path]:
    """`latencies`; `arrivals`, unless all came at once; `rates` when there are several; the files written.

    Args:
      results: a setting's figures each.
      records: of the same settings.
      form: svg or png.
    """
    labels = ["at once" if result["rate"] is None else f"{result['rate']:.3g}/s" for result in results]
    files = [_draw_latencies(labels, records, Path(folder), form)]
    spread = [(label, runs) for label, runs in zip(labels, records, strict=True) if _spans(runs)]
    if spread:
        files.append(_draw_arrivals(spread, Path(folder), form))
    rated = [result for result in results if result["rate"] is not None]
    if len(rated) > 1:
        files.append(_draw_rates(rated, Path(folder), form))
    return files


def _spans(runs: Runs) -> bool:
    """Whether requests came at different instants."""
    return any(run[0].due_at < run[-1].due_at for run in runs)


def _draw_latencies(labels: Sequence[str], records: Sequence[Runs], folder: Path, form: str) -> Path:
    figure = new_figure(9, 4)
    axes = figure.subplots(1, 2, sharey=True)
    for label, runs in zip(labels, records, strict=True):
        completed = [record for run in runs for record in run if record.outcome == COMPLETED]
        for panel, values in (
            (axes[0], sorted(1e3 * record.ttft_s for record in completed)),
            (axes[1], sorted(1e3 * gap for record in completed for gap in record.gaps_s)),
        ):
            if values:
                shares = [rank / len(values) for rank in range(1, len(values) + 1)]
                panel.step(values, shares, where="post", label=label)
    for panel, title in ((axes[0], "time to first token, ms"), (axes[1], "gap between tokens, ms")):
        panel.set_xlabel(title)
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("share")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=8)
    return save_figure(figure, folder, "latencies", form)


def _draw_arrivals(settings: Sequence[tuple[str, Runs]], folder: Path, form: str) -> Path:
    """Of every run's requests, since its own first arrival."""
    figure = new_figure(9, 4)
    axes = figure.subplots()
    for label, runs in settings:
        points = [(record.due_at - run[0].due_at, record) for run in runs for record in run]
        completed = [(at, 1e3 * record.ttft_s) for at, record in points if record.outcome == COMPLETED]
        dots = axes.plot([at for at, _ in completed], [ttft for _, ttft in completed], "o", markersize=3, label=label)
        refused = [at for at, record in points if record.outcome == REFUSED]
        if refused:
            colour = dots[0].get_color()
            axes.plot(refused, [0.0] * len(refused), "x", color=colour, label=f"{label}: refused")
    axes.set_xlabel("arrival, s")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save_figure(figure, folder, "arrivals", form)


def _draw_rates(results: Sequence[dict[str, Any]], folder: Path, form: str) -> Path:
    figure = new_figure(7, 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    rates = [result["rate"] for result in results]
    for key, label in (("requests_per_s", "completed"), ("goodput_requests_per_s", "met SLO")):
        upper.plot(rates, [result[key] or 0.0 for result in results], "o-", label=label, markersize=4)
    upper.plot(rates, rates, "--", color="#a0aec0", label="offered")
    upper.set_ylabel("requests/s")
    for name in ("p50", "p99"):
        lower.plot(rates, [result["ttft_ms"][name] for result in results], "o-", label=f"TTFT {name}", markersize=4)
    lower.set_yscale("log")
    lower.set_ylabel("ms")
    lower.set_xlabel("offered requests/s")
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    return save_figure(figure, folder, "rates", form)
