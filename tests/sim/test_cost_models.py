"""Cost models: features and seconds worked out by hand; coefficients from files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.scheduler import DecodeRow, DecodeRows, PrefillChunk, StepPlan
from jaxserve.sim.cost_model import LinearCost, StepFeatures, UnitCost, features_of, plan_s
from jaxserve.sim.roofline import Chip, LatentShape, ModelShape, RooflineCost

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
