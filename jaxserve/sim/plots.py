"""Plots of a run or a sweep. matplotlib is an extra: `pip install "jaxserve[plots]"`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sim.report import finite
from jaxserve.sim.simulator import SimulationResult

_PREFILL, _DECODE, _OTHER, _LIMIT = "#d1702b", "#2b6cb0", "#4a5568", "#a0aec0"


def require_matplotlib() -> None:
    """Raises ValueError, saying what to install, when there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            'plots needs matplotlib, which is not installed; install the extra: pip install "jaxserve[plots]"'
        )


def draw_run(result: SimulationResult, folder: str, form: str) -> list[Path]:
    """`timeline` (prefill and decode tokens per iteration, KV pages, queue) and `ttft_cdf`; the files written."""
    return [_draw_timeline(result, Path(folder), form), _draw_ttft(result, Path(folder), form)]


def draw_sweep(name: str, points: Sequence[dict[str, Any]], folder: str, form: str) -> Path:
    """`sweep`: latency against throughput, one dot per point; the file written."""
    figure = _figure(7, 6)
    left, right = figure.subplots(2, 1, sharex=True)
    rows = sorted(points, key=lambda point: point["figures"]["tokens_per_s"] or 0.0)
    throughput = [point["figures"]["tokens_per_s"] or 0.0 for point in rows]
    for axes, key, title in ((left, "ttft_s", "time to first token, s"), (right, "itl_s", "gap between tokens, s")):
        for quantile, colour in (("p50", _DECODE), ("p99", _PREFILL)):
            values = [_number(point["figures"][key][quantile]) for point in rows]
            axes.plot(throughput, values, "o-", color=colour, label=quantile, markersize=4)
            for point, x, y in zip(rows, throughput, values, strict=True):
                if quantile == "p99" and y == y:
                    axes.annotate(_label(point[name]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        if any(_number(point["figures"][key]["p99"]) > 0.0 for point in rows):
            axes.set_yscale("log")
        axes.set_ylabel(title)
        _finish(axes)
    left.set_title(f"latency against throughput; labels: {name} (p99)", loc="left", fontsize=10)
    right.set_xlabel("output tokens per second")
    return _save(figure, Path(folder), "sweep", form)


def _draw_timeline(result: SimulationResult, folder: Path, form: str) -> Path:
    figure = _figure(10, 7)
    mix, pages, queue = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    spans = result.timeline.spans
    edges = np.array([span.began_at for span in spans] + [spans[-1].ended_at]) if spans else np.zeros(1)
    decode = np.array([span.decode_tokens / span.iterations for span in spans])
    prefill = np.array([span.prefill_tokens / span.iterations for span in spans])
    # Steps between edges; a pause of the engine shows as a gap. Decode lies below, prefill on top.
    busy = np.array([span.busy_s / max(span.ended_at - span.began_at, 1e-12) for span in spans])
    mix.stairs(decode, edges, fill=True, color=_DECODE, label="decode")
    mix.stairs(decode + prefill, edges, baseline=decode, fill=True, color=_PREFILL, label="prefill")
    budget = result.config.max_num_batched_tokens
    mix.axhline(budget, color=_LIMIT, linestyle="--", linewidth=1, label=f"token budget {budget}")
    mix.set_ylabel("tokens per iteration")
    share = float(np.average(busy)) if len(busy) else 0.0
    mix.set_title(
        f"{result.totals.iterations} iterations; device busy {share:.0%} of drawn spans", loc="left", fontsize=10
    )
    total = result.config.num_pages - 1
    pages.stairs([100.0 * span.pages_owned / total for span in spans], edges, fill=True, color=_OTHER)
    pages.set_ylim(0, 105)
    pages.set_ylabel(f"KV pages, % of {total}")
    queue.stairs([span.queue for span in spans], edges, fill=True, color=_OTHER)
    queue.set_ylabel("requests waiting")
    queue.set_xlabel("seconds")
    _finish(mix)
    for axes in (pages, queue):
        axes.grid(alpha=0.3)
    return _save(figure, folder, "timeline", form)


def _draw_ttft(result: SimulationResult, folder: Path, form: str) -> Path:
    figure = _figure(7, 4)
    axes = figure.subplots()
    log = result.log
    ttft = np.asarray(log.first_at) - np.asarray(log.arrived_at)
    classes = np.asarray(log.class_index)
    for index, name in enumerate(log.classes):
        values = np.sort(finite(ttft[classes == index]))
        if len(values):
            axes.step(
                values, np.arange(1, len(values) + 1) / len(values), where="post", label=f"{name} ({len(values)})"
            )
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of requests with a first token")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _finish(axes)
    return _save(figure, folder, "ttft_cdf", form)


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    # Figure itself, not pyplot: no window system and no global list of figures.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize=8, framealpha=0.9)


def _save(figure: Any, folder: Path, name: str, form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{form}"
    figure.savefig(path, dpi=120)
    return path


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _label(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
