"""`tools/fit_cost_model TRACE --output=F`: the linear cost model that a real engine's trace shows.

An iteration's duration is the time from its begin to the next one's, where work was left after it: otherwise the
engine may have been idle in between. It begins when it is planned or, if the one ahead of it is still running, when
that has come back.

The fit has two steps. The first minimises the sum of absolute residuals with coefficients of at least 0: each
iteration counts the same, and a few slow ones move nothing. What it predicts is a median, and durations are skewed:
an iteration may be delayed, never hastened. So the sum of its predictions tends to be too small, and a simulation
near saturation to see a shorter queue. The second step multiplies all coefficients by one factor, so that the
predictions add up to what was measured, over the iterations that are not slow: slow is one that took more than
`SLOW` times what the first step predicts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.cost_model import LinearCost, Windows, mean_seen
from jaxserve.sim.fixed_workload import read_trace

MIN_ITERATIONS = 20
SLOW = 2.0
"""Times the predicted duration from which on an iteration counts as held up by something else."""
_ROUNDS = 100

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and how it came about.

    Attributes:
      scale: factor of the second step, contained in the coefficients.
      slow: bool[n], iterations that did not count in it.
    """

    cost: LinearCost
    scale: float
    slow: npt.NDArray[np.bool_]


def trace_samples(path: str | Path) -> tuple[Matrix, Matrix]:
    """The usable iterations of a trace.

    Returns:
      float64[n, 7]: steps, decode rows and K/V tokens read of all of them, prefill tokens, prefill attention,
      swapped pages, 1;
      float64[n]: durations, seconds.

    Raises:
      ValueError: no trace, or one with fewer than `MIN_ITERATIONS` usable iterations.
    """
    try:
        rows, durations = _samples(path)
    except KeyError as error:
        raise ValueError(
            f"{path}: a record or request lacks {error}; a trace must be whole, from its header on"
        ) from None
    if len(rows) < MIN_ITERATIONS:
        raise ValueError(
            f"{path} has {len(rows)} iterations that were followed by another at once; a fit needs {MIN_ITERATIONS}"
        )
    return np.asarray(rows, np.float64), np.asarray(durations, np.float64)


def fit(samples: Matrix, durations: Matrix) -> Fit:
    """Both steps; see the module.

    Raises:
      ValueError: the trace explains no duration: all coefficients are 0.
    """
    coefficients = _medians(samples, durations)
    predicted = samples @ coefficients
    slow = durations > SLOW * predicted
    total = float(predicted[~slow].sum())
    if total <= 0.0:
        raise ValueError("no coefficient is above 0; is the trace of a real engine?")
    scale = float(durations[~slow].sum()) / total
    return Fit(LinearCost(*(scale * coefficients).tolist()), scale, slow)


def _medians(samples: Matrix, durations: Matrix) -> Matrix:
    """The first step: least absolute residuals, coefficients at least 0; float64[7]."""
    # A column of one order of magnitude with the others; one that never occurs keeps the coefficient 0.
    scale = np.abs(samples).max(axis=0)
    used = [index for index in range(samples.shape[1]) if scale[index] > 0.0]
    if (samples[:, 0] == samples[:, -1]).all():  # no iteration has several steps: what is whose cannot be told
        used.remove(samples.shape[1] - 1)
    while used:
        columns = samples[:, used] / scale[used]
        solution = _least_absolute(columns, durations)
        if (solution >= 0.0).all():
            break
        del used[int(solution.argmin())]
    coefficients = np.zeros(samples.shape[1])
    if used:
        coefficients[used] = solution / scale[used]
    return coefficients


def residuals(found: Fit, samples: Matrix, durations: Matrix) -> dict[str, float]:
    """How far the model is off: absolute, in seconds, and relative to the duration.

    `predicted_over_measured_total` is over all iterations; without the slow ones it is 1.
    """
    predicted = samples @ np.asarray(list(asdict(found.cost).values()))
    absolute = np.abs(predicted - durations)
    relative = absolute / np.maximum(durations, 1e-12)
    return {
        "iterations": len(durations),
        "slow_iterations": int(found.slow.sum()),
        "slow_share_of_time": float(durations[found.slow].sum() / durations.sum()),
        "scale": found.scale,
        "median_duration_s": float(np.median(durations)),
        "median_absolute_s": float(np.median(absolute)),
        "p90_absolute_s": float(np.quantile(absolute, 0.9)),
        "largest_absolute_s": float(absolute.max()),
        "median_relative": float(np.median(relative)),
        "p90_relative": float(np.quantile(relative, 0.9)),
        "predicted_over_measured_total": float(predicted.sum() / durations.sum()),
    }


def main(argv: Sequence[str]) -> None:
    """Fits, prints coefficients and residuals, writes the file.

    Raises:
      SystemExit: non-zero on a mistake in flags or trace.
    """
    trace = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else None
    flags = parse_flags("fit_cost_model", [argv[0], *argv[1 if trace is None else 2 :]])
    if trace is None:
        exit_with("say first which trace: tools/fit_cost_model TRACE --output=FILE")
    try:
        samples, durations = trace_samples(trace)
        found = fit(samples, durations)
    except ValueError as error:
        exit_with(str(error))
    quality = residuals(found, samples, durations)
    for name, value in {**asdict(found.cost), **quality}.items():
        print(f"{name:>30} {value:.6g}")
    if flags.output:
        document = {**asdict(found.cost), "fit": {"trace": Path(trace).name, **quality}}
        Path(flags.output).write_text(json.dumps(document, indent=1) + "\n")


def _samples(path: str | Path) -> tuple[list[tuple[float, ...]], list[float]]:
    rows: list[tuple[float, ...]] = []
    durations: list[float] = []
    prompts: dict[str, int] = {}
    written: dict[str, int] = {}  # tokens with K/V, per id
    previous: dict[str, Any] | None = None
    began_at = updated_at = -math.inf
    config = TraceReader(path).header.config
    for record in read_trace(path):
        for event in record.get("events", ()):
            if event["kind"] == "add" and event["outcome"] != "duplicate_id":
                prompts[event["id"]] = event["prompt"]
                written[event["id"]] = 0
        if record.get("kind") is not None:
            continue
        last_began_at, began_at = began_at, max(record["now"], updated_at)
        updated_at = record["updated_at"]
        if previous is not None:
            if previous["active"] or previous["queue"] or previous["in_flight"]:
                durations.append(began_at - last_began_at)
            else:
                rows.pop()
        for request_id in record["preempted"]:
            # Without its pages it begins anew, but where it was paused, which none but "pause" does.
            if config.preemption != "pause" and request_id not in dict(record.get("swapped_out", ())):
                written[request_id] = 0
        rows.append(_work(record, prompts, written, config.windows))
        previous = record
    return rows[: len(durations)], durations  # nobody knows how long the last took


def _work(
    record: dict[str, Any], prompts: dict[str, int], written: dict[str, int], windows: Windows
) -> tuple[float, ...]:
    tokens = 0
    firsts: list[int] = []
    starts: list[int] = []
    counts = record.get("decode_tokens") or [1] * len(record["decode"])
    for request_id, count in zip(record["decode"], counts, strict=True):
        before = max(written[request_id], prompts[request_id])
        written[request_id] = before + count
        firsts.append(before)
    for request_id, count in record["prefill"]:
        tokens += count
        starts.append(written[request_id])
        written[request_id] += count
    context = mean_seen(firsts, counts, windows)
    attention = mean_seen(starts, [count for _, count in record["prefill"]], windows)
    swapped = sum(
        pages
        for _, pages in (*record.get("swapped_out", ()), *record.get("swapped_in", ()), *record.get("imported", ()))
    )
    # Where every row had ended before it began, no step ran.
    steps = max(counts, default=1) if record.get("decode_steps", 1) > 1 else 1
    return tuple(map(float, (steps, sum(counts), context, tokens, attention, swapped, 1)))


def _least_absolute(columns: Matrix, durations: Matrix) -> Matrix:
    """Least absolute residuals, by least squares with weights of 1 / |residual|; a coefficient per column."""
    weights = np.ones(len(durations))
    floor = 1e-6 * max(float(np.median(durations)), 1e-12)
    solution = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(columns * root[:, None], durations * root, rcond=None)
        settled = np.allclose(found, solution, rtol=1e-9, atol=0.0)
        solution = found
        if settled:
            break
        weights = 1.0 / np.maximum(np.abs(columns @ solution - durations), floor)
    return solution


if __name__ == "__main__":
    run_command(main)
