"""The cost model that is fitted to a trace: what it recovers, what it refuses."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import TraceWriter
from jaxserve.sim import fit
from jaxserve.sim.cost_model import LinearCost
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.workload import parse_workload

REPOSITORY = Path(__file__).parents[2]
COST = LinearCost(2e-3, 3e-5, 4e-8, 5e-6, 6e-10, 1e-4)


def write_trace(path, num_requests=150, spoil=None, cost=None, rate=25.0, **settings):
    """A trace of an engine that takes `cost` (COST); `spoil(records)` changes it."""
    document = {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt": {"kind": "uniform", "low": 10, "high": 900},
        "output": {"kind": "uniform", "low": 2, "high": 60},
    }
    config = SchedulerConfig(**({"max_num_batched_tokens": 256, "prefill_chunk": 200, "num_pages": 1024} | settings))
    records = []
    writer = TraceWriter(path, config=config)
    Simulator(config, cost or COST, parse_workload(document, "fit").source(), trace=records.append).run()
    for record in spoil(records) if spoil else records:
        writer(record)
    writer.close()
    return path


SWAPPING = {
    "num_pages": 1200,
    "page_size": 1,
    "reservation": "optimistic",
    "preemption": "swap",
    "num_host_pages": 600,
}
"""Some preemptions swap, and some, for want of host pages, recompute."""


def assert_recovered(cost, rel, swaps=False):
    for name in LinearCost.__slots__:
        if name == "swapped_page_s" and not swaps:
            assert cost.swapped_page_s == 0.0
            continue
        assert getattr(cost, name) == pytest.approx(getattr(COST, name), rel=rel), name


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_fit_recovers_the_coefficients_behind_a_trace(tmp_path, ahead):
    samples, durations = fit.trace_samples(write_trace(tmp_path / "trace.jsonl", max_steps_ahead=ahead))
    assert len(durations) > 500
    found = fit.fit(samples, durations)
    assert_recovered(found.cost, 1e-4)
    quality = fit.residuals(found, samples, durations)
    assert quality["median_relative"] < 1e-6
    assert quality["predicted_over_measured_total"] == pytest.approx(1.0) == quality["scale"]
    assert (quality["slow_iterations"], quality["slow_share_of_time"]) == (0, 0.0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_fit_recovers_what_a_dispatch_takes_from_a_trace_of_several_steps(tmp_path, ahead):
    cost = replace(COST, swapped_page_s=0.0, dispatch_s=0.5 * COST.constant_s)
    several = {"max_steps_ahead": ahead, "max_decode_steps": 8, "max_arrival_delay_s": 1e6}
    path = write_trace(tmp_path / "trace.jsonl", cost=cost, rate=5.0, **several)
    samples, durations = fit.trace_samples(path)
    assert (samples[:, 0] > 1).sum() > 50
    found = fit.fit(samples, durations).cost
    assert asdict(found) == pytest.approx(asdict(cost), rel=1e-3)


def test_the_fit_counts_what_was_swapped_and_what_was_computed_again(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", **SWAPPING)
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    swapped = [name for record in records for name, _ in record.get("swapped_out", ())]
    preempted = [name for record in records for name in record.get("preempted", ())]
    assert 3 < len(swapped) < len(preempted) - 3
    samples, durations = fit.trace_samples(path)
    assert_recovered(fit.fit(samples, durations).cost, 1e-4, swaps=True)


def test_a_few_slow_iterations_do_not_move_the_fit(tmp_path):
    def spoil(records):
        delay, rng = 0.0, random.Random(3)
        for record in records:
            record["now"] += delay
            if rng.random() < 0.05:
                delay += 0.5
        return records

    samples, durations = fit.trace_samples(write_trace(tmp_path / "trace.jsonl", spoil=spoil))
    assert durations.max() > 0.4
    found = fit.fit(samples, durations)
    assert_recovered(found.cost, 0.02)
    assert 0.03 < found.slow.mean() < 0.07 and durations[found.slow].min() > 0.4


def drawn_samples(rng, count=4000):
    """Iterations of 1 to 8 decode rows, a third of them with a chunk: float64[count, 7]."""
    rows = rng.integers(1, 9, count)
    context = rows * rng.integers(50, 900, count)
    tokens = rng.integers(1, 250, count) * (rng.random(count) < 1 / 3)
    attention = tokens * rng.integers(1, 500, count)
    ones = np.ones(count)
    return np.stack([ones, rows, context, tokens, attention, 0 * rows, ones], axis=1).astype(float)


def test_what_a_dispatch_takes_is_told_apart_where_iterations_have_several_steps():
    rng = np.random.default_rng(0)
    samples = drawn_samples(rng)
    steps = np.where(samples[:, 3] > 0, 1, rng.integers(1, 9, len(samples)))
    samples[:, :3] *= steps[:, None]
    cost = replace(COST, dispatch_s=0.25 * COST.constant_s)
    durations = samples @ np.array(list(asdict(cost).values()))
    found = fit.fit(samples, durations).cost
    assert found.dispatch_s == pytest.approx(cost.dispatch_s, rel=0.01)
    assert found.constant_s == pytest.approx(cost.constant_s, rel=0.01)
    samples[:, 0] = 1.0
    assert fit.fit(samples, durations).cost.dispatch_s == 0.0, "every iteration has one step: nobody can tell"


def test_the_fit_adds_up_to_what_was_measured_under_skewed_noise():
    """Lognormal noise of median 1 has the mean exp(sigma^2 / 2), here 1.046: a median fit is so much too low."""
    rng = np.random.default_rng(0)
    samples = drawn_samples(rng)
    exact = samples @ np.array(list(asdict(COST).values()))
    durations = exact * rng.lognormal(0.0, 0.3, len(exact))
    found = fit.fit(samples, durations)
    quality = fit.residuals(found, samples, durations)
    assert found.scale == pytest.approx(1.04, abs=0.01)
    assert quality["predicted_over_measured_total"] == pytest.approx(1.0, abs=0.02)
    usual = ~found.slow
    predicted = samples @ np.array(list(asdict(found.cost).values()))
    assert predicted[usual].sum() == pytest.approx(durations[usual].sum())
    assert found.cost.constant_s == pytest.approx(1.04 * COST.constant_s, rel=0.03)


def test_pauses_change_neither_coefficients_nor_scale():
    rng = np.random.default_rng(0)
    samples = drawn_samples(rng)
    exact = samples @ np.array(list(asdict(COST).values()))
    durations = exact * rng.lognormal(0.0, 0.2, len(exact))
    paused = durations + 0.5 * (rng.random(len(exact)) < 0.01)
    calm, found = fit.fit(samples, durations), fit.fit(samples, paused)
    assert found.slow.sum() == pytest.approx(40 + calm.slow.sum(), abs=20)
    assert found.scale == pytest.approx(calm.scale, rel=0.005)
    assert found.cost.constant_s == pytest.approx(calm.cost.constant_s, rel=0.01)
    total = fit.residuals(found, samples, paused)["predicted_over_measured_total"]
    # The pauses are not predicted: they are most of what was measured.
    assert total == pytest.approx(1.0 - fit.residuals(found, samples, paused)["slow_share_of_time"], abs=0.02)


def test_a_trace_that_explains_no_duration_is_refused():
    with pytest.raises(ValueError, match="no coefficient is above 0; is the trace of a real engine"):
        fit.fit(drawn_samples(np.random.default_rng(0), 30), np.zeros(30))


def test_pauses_of_the_engine_are_not_durations(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", num_requests=30)
    spread = write_trace(tmp_path / "spread.jsonl", 30, spoil=lambda records: _with_pauses(records))
    samples, durations = fit.trace_samples(spread)
    plain_samples, plain_durations = fit.trace_samples(path)
    assert durations.max() < 1.0
    assert (samples == plain_samples).all()
    assert durations == pytest.approx(plain_durations)


def _with_pauses(records):
    pause = 0.0
    for record in records:
        record["now"] += pause
        if not record["active"] and not record["queue"]:
            pause += 1000.0
    assert pause > 0.0
    return records


def test_a_short_trace_is_refused(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", spoil=lambda records: records[:10])
    with pytest.raises(ValueError, match=r"9 iterations that were followed by another at once; a fit needs 20"):
        fit.trace_samples(path)


def test_the_tool_writes_what_simulate_reads(tmp_path):
    trace, output = write_trace(tmp_path / "trace.jsonl"), tmp_path / "cost.json"
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.sim.fit", str(trace), f"--output={output}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "median_absolute_s" in done.stdout
    assert_recovered(LinearCost.from_file(output), 1e-4)
    written = json.loads(output.read_text())["fit"]
    assert written["iterations"] > 500 and written["scale"] == pytest.approx(1.0)


def test_the_tool_names_a_missing_argument():
    venv = Path(sys.executable).parents[1]
    done = subprocess.run(
        [REPOSITORY / "tools" / "fit_cost_model"],
        capture_output=True,
        text=True,
        env=os.environ | {"VENV": str(venv)},
    )
    assert done.returncode == 2
    assert "tools/fit_cost_model TRACE --output=FILE" in done.stderr
