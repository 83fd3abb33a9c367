"""Plots of a run or a sweep. matplotlib is an extra: `pip install "jaxserve[plots]"`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.sim.report import finite
from jaxserve.sim.simulator import SimulationResult
from jaxserve.sim.timeline import Span

_PREFILL, _DECODE, _OTHER, _LIMIT = "#d1702b", "#2b6cb0", "#4a5568", "#a0aec0"
_BINS = 300

Values = npt.NDArray[np.float64]


def require_matplotlib() -> None:
    """Raises ValueError, saying what to install, when there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            'plots needs matplotlib, which is not installed; install the extra: pip install "jaxserve[plots]"'
        )


def draw_run(result: SimulationResult, folder: str, form: str) -> list[Path]:
    """`timeline` (prefill and decode tokens per iteration, KV pages, queue) and `ttft_cdf`; the files written."""
    return [_draw_timeline(result, Path(folder), form), _draw_ttft(result, Path(folder), form)]


def draw_ranking(names: Sequence[str], points: Sequence[dict[str, Any]], folder: str, form: str) -> Path:
    """`ranking`: a bar per point with its highest rate, the best on top; the file written.

    Args:
      names: of the settings that tell the points apart.
      points: in that order.
    """
    figure = new_figure(7, 1.5 + 0.25 * len(points))
    axes = figure.subplots()
    rates = [point["rate"] or 0.0 for point in points]
    bars = axes.barh(range(len(points)), rates, color=[_PREFILL, *[_DECODE] * (len(points) - 1)])
    axes.bar_label(bars, [f"{rate:.3g}" if rate else "none" for rate in rates], padding=3, fontsize=7)
    axes.set_yticks(range(len(points)), [_labels(names, point) for point in points], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("highest rate that meets the objectives, requests/s")
    axes.set_title(f"best first; labels: {', '.join(names)}", loc="left", fontsize=10)
    axes.grid(alpha=0.3, axis="x")
    return save_figure(figure, Path(folder), "ranking", form)


def draw_sweep(names: Sequence[str], points: Sequence[dict[str, Any]], folder: str, form: str) -> Path:
    """`sweep`: latency against throughput, one dot per point, joined where one value differs; the file written."""
    line = "o-" if len(names) == 1 else "o"
    figure = new_figure(7, 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    throughput = [point["figures"]["tokens_per_s"] or 0.0 for point in points]
    for axes, key, title in ((upper, "ttft_s", "time to first token, s"), (lower, "itl_s", "gap between tokens, s")):
        for quantile, colour in (("p50", _DECODE), ("p99", _PREFILL)):
            values = [_number(point["figures"][key][quantile]) for point in points]
            axes.plot(throughput, values, line, color=colour, label=quantile, markersize=4)
            if axes is upper and quantile == "p99":
                for point, x, y in zip(points, throughput, values, strict=True):
                    axes.annotate(_labels(names, point), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, framealpha=0.9)
    # Under overload waiting grows by orders of magnitude, gaps do not.
    upper.set_yscale("log")
    lower.set_ylim(bottom=0)
    upper.set_title(f"latency against throughput; labels: {', '.join(names)}", loc="left", fontsize=10)
    lower.set_xlabel("output tokens per second")
    return save_figure(figure, Path(folder), "sweep", form)


def _draw_timeline(result: SimulationResult, folder: Path, form: str) -> Path:
    figure = new_figure(10, 7)
    mix, pages, queue = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    edges, bins = _bins(result.timeline.spans)
    decode, prefill, owned, waiting = bins
    # Decode lies below, prefill on top.
    mix.stairs(decode, edges, fill=True, color=_DECODE, label="decode")
    mix.stairs(decode + prefill, edges, baseline=decode, fill=True, color=_PREFILL, label="prefill")
    budget = result.config.max_num_batched_tokens
    mix.axhline(budget, color=_LIMIT, linestyle="--", linewidth=1, label=f"token budget {budget}")
    mix.set_ylabel("tokens per iteration")
    averaged = f", mean of {_BINS} bins" if len(result.timeline.spans) > _BINS else ""
    mix.set_title(f"{result.totals.iterations} iterations{averaged}", loc="left", fontsize=10)
    total = result.config.num_pages - 1
    pages.stairs(100.0 * owned / total, edges, fill=True, color=_OTHER)
    pages.set_ylabel(f"KV pages, % of {total}")
    queue.stairs(waiting, edges, fill=True, color=_OTHER)
    queue.set_ylabel("requests waiting")
    queue.set_xlabel("seconds")
    mix.grid(alpha=0.3)
    mix.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    for axes in (pages, queue):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    return save_figure(figure, folder, "timeline", form)


def _bins(spans: Sequence[Span]) -> tuple[Values, Values]:
    """Edges of the steps to draw; and decode and prefill tokens per iteration, pages and queue in each.

    One step per span where they are few, with steps of height 0 where the engine paused; else bins of equal
    duration: means of the tokens, largest of pages and queue.
    """
    if not spans:
        return np.zeros(2), np.zeros((4, 1))
    if len(spans) <= _BINS:
        edges, steps = [spans[0].began_at], []
        for span in spans:
            if span.began_at > edges[-1]:
                edges.append(span.began_at)
                steps.append((0.0, 0.0, 0.0, 0.0))
            edges.append(span.ended_at)
            tokens = (span.decode_tokens / span.iterations, span.prefill_tokens / span.iterations)
            steps.append((*tokens, span.pages_owned, span.queue))
        return np.array(edges), np.array(steps).T
    grid = np.linspace(spans[0].began_at, spans[-1].ended_at, _BINS + 1)
    middles = [(span.began_at + span.ended_at) / 2 for span in spans]
    index = np.clip(np.searchsorted(grid, middles, side="right") - 1, 0, _BINS - 1)
    sums, largest = np.zeros((3, _BINS)), np.zeros((2, _BINS))
    for row, span in zip(index, spans, strict=True):
        sums[:, row] += (span.decode_tokens, span.prefill_tokens, span.iterations)
        largest[:, row] = np.maximum(largest[:, row], (span.pages_owned, span.queue))
    return grid, np.concatenate([sums[:2] / np.maximum(sums[2], 1), largest])


def _draw_ttft(result: SimulationResult, folder: Path, form: str) -> Path:
    figure = new_figure(7, 4)
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
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return save_figure(figure, folder, "ttft_cdf", form)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
      ValueError: there is no matplotlib.
    """
    require_matplotlib()
    # Figure itself, not pyplot: no window system and no global list of figures.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, folder: Path, name: str, form: str) -> Path:
    """Writes a figure to `folder`/`name`.`form`; the file written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{form}"
    figure.savefig(path, dpi=120)
    return path


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _labels(names: Sequence[str], point: dict[str, Any]) -> str:
    values = (point[name] for name in names)
    return ", ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
