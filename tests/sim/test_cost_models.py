"""Cost models: features and seconds worked out by hand, coefficients recovered from traces."""

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
from jaxserve.scheduler import DecodeRow, DecodeRows, PrefillChunk, StepPlan, TraceWriter
from jaxserve.sim import fit
from jaxserve.sim.cost_model import LinearCost, StepFeatures, UnitCost, features_of, plan_s
from jaxserve.sim.roofline import Chip, LatentShape, ModelShape, RooflineCost
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.workload import parse_workload

REPOSITORY = Path(__file__).parents[2]
COST = LinearCost(2e-3, 3e-5, 4e-8, 5e-6, 6e-10, 1e-4)


def test_a_plan_of_several_steps_costs_what_its_steps_cost():
    plan = StepPlan(0, DecodeRows(("a", "b"), (0, 1), (4, 9), (3, 2)), num_steps=3)
    cost = LinearCost(1.0, 0.1, 0.01, 0.2, 0.001, dispatch_s=5.0)
    # Contexts 5 and 10, 6 and 11, 7.
    assert plan_s(cost, plan, (3, 2)) == (pytest.approx(5.0 + 3 * 1.0 + 5 * 0.1 + 39 * 0.01), 3)
    # The second stops by an id at once, and the first had ended before: one step.
    assert plan_s(cost, plan, (0, 1)) == (pytest.approx(5.0 + 1.0 + 0.1 + 0.1), 1)
    assert plan_s(UnitCost(), plan, (3, 1)) == (3.0, 3)
    assert plan_s(UnitCost(), plan, (0, 0)) == (1.0, 1)


def test_features_of_a_plan_by_hand():
    plan = StepPlan(
        0,
        decode=DecodeRows.of([DecodeRow("a", 0, 9), DecodeRow("b", 1, 4)]),
        prefill=(PrefillChunk("c", 2, 3, (1, 1), False), PrefillChunk("d", 3, 0, (1, 1, 1), True)),
    )
    # c's tokens attend to 4 and 5 tokens, d's to 1, 2 and 3.
    assert features_of(plan) == StepFeatures(2, 15, 5, 15, 8, 3)


def test_features_under_a_sliding_window_by_hand():
    plan = StepPlan(
        0,
        decode=DecodeRows.of([DecodeRow("a", 0, 9), DecodeRow("b", 1, 2)]),
        prefill=(PrefillChunk("c", 2, 3, (1, 1), False), PrefillChunk("d", 3, 0, (1, 1, 1, 1, 1, 1), True)),
    )
    # a reads 4 and b 3; c's tokens attend to 4 and 4 of tokens 0 to 4, d's to 1, 2, 3, 4, 4 and 4 of 6.
    assert features_of(plan, (4,)) == StepFeatures(2, 7, 8, 26, 5 + 6, 3)
    run = StepPlan(0, DecodeRows(("a",), (0,), (2,), (3,)), num_steps=3)
    assert plan_s(LinearCost(0.0, 0.0, 1.0, 0.0, 0.0), run, (3,), (4,)) == (3.0 + 4.0 + 4.0, 3)


def test_features_of_groups_of_layers_are_the_mean():
    plan = StepPlan(
        0,
        decode=DecodeRows.of([DecodeRow("a", 0, 9), DecodeRow("b", 1, 2)]),
        prefill=(PrefillChunk("c", 2, 3, (1, 1), False),),
    )
    full, windowed = features_of(plan), features_of(plan, (4,))
    assert (full.decode_context, full.prefill_attention, full.prefill_context) == (13, 9, 5)
    assert (windowed.decode_context, windowed.prefill_attention, windowed.prefill_context) == (7, 8, 5)
    both = features_of(plan, (0, 4, 4))
    assert (both.decode_context, both.prefill_attention, both.prefill_context) == (27 // 3, 25 // 3, 15 // 3)
    run = StepPlan(0, DecodeRows(("a",), (0,), (2,), (3,)), num_steps=3)
    assert plan_s(LinearCost(0.0, 0.0, 1.0, 0.0, 0.0), run, (3,), (0, 4)) == (3.0 + 4.0 + 4.0, 3)


def test_unit_and_linear():
    features = StepFeatures(2, 15, 5, 15, 8, 3)
    assert UnitCost().step_s(features) == 1.0
    assert LinearCost(1.0, 0.1, 0.01, 0.2, 0.001).step_s(features) == pytest.approx(1 + 0.2 + 0.15 + 1.0 + 0.015)
    assert "decode rows: 1.000e-01 s x 2 = 2.000e-01 s" in LinearCost(1.0, 0.1, 0.01, 0.2, 0.001).explain(features)


SHAPE = ModelShape(2, 8, 16, 4, 2, 4, 100, False)
CHIP = Chip("toy", 1e6, 1e5, 1e5)


def test_the_roofline_by_hand():
    cost = RooflineCost(CHIP, SHAPE, compute_efficiency=0.5, memory_efficiency=1.0, overhead_s=0.25)
    layer = 2 * (8 * 4 * (4 + 2 + 2 + 4) + 3 * 8 * 16)
    kv_bytes = 2 * 2 * 2 * 4 * 2
    assert (SHAPE.layer_weights, SHAPE.num_weights, cost.kv_token_bytes) == (layer, layer + 2 * 800, kv_bytes)
    decode = StepFeatures(decode_rows=3, decode_context=30, emitted=3)
    flops = 2 * layer * 3 + 2 * 800 * 3 + 4 * 2 * 4 * 4 * 30
    moved = (layer + 800) * 2 + kv_bytes * 33
    assert cost.step_s(decode) == pytest.approx(0.25 + max(flops / 5e5, moved / 1e5))
    assert moved / 1e5 > flops / 5e5
    assert "bound by memory" in cost.explain(decode)[-1]
    linked = RooflineCost(CHIP, SHAPE, overhead_s=0.25, host_bandwidth=1e4, page_size=4)
    extra = linked.step_s(replace(decode, swapped_pages=5)) - linked.step_s(decode)
    assert extra == pytest.approx(5 * 4 * kv_bytes / 1e4)
    prefill = StepFeatures(prefill_tokens=1000, prefill_attention=500_500, prefill_context=1000, emitted=1)
    flops = 2 * layer * 1000 + 1600 + 128 * 500_500
    assert cost.step_s(prefill) == pytest.approx(0.25 + flops / 5e5)
    assert f"{flops:.3e}" in cost.explain(prefill)[2]


def test_devices_share_what_divides_among_them():
    single, two, four = (RooflineCost(CHIP, SHAPE, num_chips=count, overhead_s=0.0) for count in (1, 2, 4))
    features = StepFeatures(prefill_tokens=1000, prefill_attention=500_500, prefill_context=1000)
    assert two.kv_token_bytes == single.kv_token_bytes / 2 and two.held_bytes == single.held_bytes / 2
    assert two.step_s(features) == pytest.approx(single.step_s(features) / 2)
    # Each of two KV heads is held by two of four devices, which share its query heads.
    assert four.kv_token_bytes == single.kv_token_bytes / 2
    kv_weights = 2 * 8 * 2 * 2 * 4
    assert four.held_bytes == (SHAPE.num_weights - kv_weights) * 2 / 4 + kv_weights * 2 / 2
    flops = 2 * 1000 * ((SHAPE.layer_weights - kv_weights) / 4 + kv_weights / 2) + 4 * 2 * 4 / 4 * 4 * 500_500
    assert four.step_s(features) == pytest.approx(flops / (CHIP.peak_flops * 0.6))
    # Two KV heads do not divide among three, nor three by them: each device has both, and attends for all heads.
    three = RooflineCost(CHIP, SHAPE, num_chips=3, overhead_s=0.0)
    assert three.kv_token_bytes == single.kv_token_bytes and three.held_bytes == single.held_bytes


def test_latent_attention_by_hand():
    latent = LatentShape(q_rank=6, kv_rank=5, nope=3, rope=2, value=4)
    shape = ModelShape(2, 8, 16, 4, 1, latent.row, 100, False, latent=latent)
    heads, whole = 4 * (6 * 5 + 5 * (3 + 4) + 4 * 8), 8 * (6 + 7)
    assert shape.layer_weights == 2 * (heads + whole + 3 * 8 * 16)
    cost = RooflineCost(CHIP, shape, num_chips=2, compute_efficiency=1.0, overhead_s=0.0)
    assert cost.kv_token_bytes == 2 * 7 * 2  # one row of 7 numbers in each layer, on every device
    features = StepFeatures(prefill_tokens=1000, prefill_attention=500_500, prefill_context=1000)
    own = 2 * (heads / 2 + whole + 3 * 8 * 16 / 2)
    attention = 2 * 2 * (4 / 2) * (7 + 5)
    assert cost.step_s(features) == pytest.approx((2 * own * 1000 + attention * 500_500) / CHIP.peak_flops)


def test_pages_are_what_the_weights_leave():
    cost = RooflineCost(CHIP, SHAPE)
    weights = SHAPE.num_weights * 2
    assert cost.num_pages(4, 0.5) == (50_000 - weights) // (4 * 64)
    with pytest.raises(ValueError, match=r"weights take 0.0 GB of each toy, .* \(memory_fraction 0.01\); raise tensor"):
        cost.num_pages(4, 0.01)


MIXED = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}


def test_a_mixture_reads_the_experts_that_a_step_touches_and_multiplies_with_those_of_a_token(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    shape = ModelShape.from_file(tmp_path)
    attention, dense, router, expert = 3 * 8 * 4 * 12, 3 * 8 * 16, 2 * 8 * 6, 2 * 3 * 8 * 4
    assert shape.layer_weights == attention + dense + router + 6 * expert
    assert shape.token_weights == attention + dense + router + 2 * expert
    assert shape.read_weights(0) == shape.layer_weights - 6 * expert
    assert shape.read_weights(1) == pytest.approx(shape.token_weights)
    # Of 6 experts, two tokens of 2 each touch 2 + 2 x 4/6.
    assert shape.read_weights(2) == pytest.approx(shape.layer_weights - (6 - 2 - 8 / 6) * expert)
    assert shape.read_weights(1000) == pytest.approx(shape.layer_weights)
    cost = RooflineCost(CHIP, shape, compute_efficiency=1.0, memory_efficiency=1.0, overhead_s=0.0, weight_bits=8)
    few, many = (cost.step_s(StepFeatures(decode_rows=rows, emitted=0)) for rows in (1, 2))
    moved = 8 / 6 * expert + cost.kv_token_bytes
    assert (many - few) * CHIP.bandwidth == pytest.approx(moved)


def test_shared_experts_and_dense_first_layers_are_counted(tmp_path):
    deepseek = {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2}
    config = {name: value for name, value in MIXED.items() if name not in ("num_experts", "mlp_only_layers")}
    (tmp_path / "config.json").write_text(json.dumps(config | deepseek))
    shape = ModelShape.from_file(tmp_path)
    assert (shape.num_expert_layers, shape.num_experts, shape.shared_hidden) == (1, 6, 8)
    attention, dense = 3 * 8 * 4 * 12, 2 * 3 * 8 * 16
    assert shape.token_weights == attention + dense + 8 * 6 + 3 * 8 * (2 * 4 + 8)


def test_impossible_devices_are_refused():
    with pytest.raises(ValueError, match=r"memory_efficiency is 1.5; it must be in \(0, 1\]"):
        RooflineCost(CHIP, SHAPE, memory_efficiency=1.5)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 0; it must be an integer of at least 1"):
        RooflineCost(CHIP, SHAPE, num_chips=0)
    with pytest.raises(ValueError, match=r"memory_fraction is 2; it must be in \(0, 1\]"):
        RooflineCost(CHIP, SHAPE).num_pages(4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_token_s": -1}, "kv_token_s is -1; it must be a finite number of at least 0"),
        ({"kv_token_s": None}, "kv_token_s is null; it must be a finite number"),
        ({"speed": 1}, "speed is not a field; the fields of"),
        ({"constant_s": 0, "decode_row_s": 0}, "constant_s is 0; it must be above 0, unless"),
    ],
)
def test_bad_coefficients_name_field_and_rule(tmp_path, change, message):
    path = tmp_path / "cost.json"
    good = dict.fromkeys(("constant_s", "decode_row_s", "kv_token_s", "prefill_token_s", "prefill_attention_s"), 1e-3)
    path.write_text(json.dumps(good))
    assert LinearCost.from_file(path) == LinearCost(*[1e-3] * 5)
    path.write_text(json.dumps(good | {"swapped_page_s": 2e-3}))
    assert LinearCost.from_file(path) == LinearCost(*[1e-3] * 5, 2e-3)
    path.write_text(json.dumps(good | change))
    with pytest.raises(ValueError) as raised:
        LinearCost.from_file(path)
    assert message in str(raised.value)


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
