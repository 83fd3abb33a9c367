"""bench machine: the bound, worked by hand, and a run on a tiny model."""

import json
from dataclasses import replace

import jax
import pytest

from jaxserve.bench import machine
from jaxserve.bench.__main__ import main
from jaxserve.models import ExpertsConfig, ModelConfig, RopeConfig, init_params, stack_layers

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=100,
    intermediate_size=200,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=30,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
# Per layer 100 * 30 * (4 + 2 + 2 + 4) of attention and 3 * 100 * 200 of the MLP; and the vocabulary.
WEIGHTS = 2 * (36_000 + 60_000) + 100_000


@pytest.mark.parametrize(("gflop_per_s", "bound_by"), [(100.0, "weights_ms"), (0.001, "flops_ms")])
def test_the_bound_is_the_longer_of_weights_and_flops_and_the_kv(gflop_per_s, bound_by):
    bound = machine.decode_bound(CONFIG, "bfloat16", 8, 50, 2 * WEIGHTS, gb_per_s=1.0, gflop_per_s=gflop_per_s)
    assert bound["weights_ms"] == pytest.approx(1e3 * 2 * WEIGHTS / 1e9)
    assert bound["flops_ms"] == pytest.approx(1e3 * 2 * 8 * WEIGHTS / (gflop_per_s * 1e9))
    # K and V of 8 rows, 50 tokens, 2 layers, 2 heads of 30, 2 bytes each.
    assert bound["kv_ms"] == pytest.approx(1e3 * 2 * 8 * 50 * 2 * 2 * 30 * 2 / 1e9)
    assert bound["bound_ms"] == pytest.approx(bound[bound_by] + bound["kv_ms"])


@pytest.mark.parametrize("stacked", [False, True])
def test_products_are_those_of_a_step(monkeypatch, stacked):
    monkeypatch.setattr(machine, "TRIES", 1)
    params = init_params(CONFIG, jax.random.key(0))
    if stacked:
        params = stack_layers(params)
    products = machine.measure_matmuls(CONFIG, params, "float32", 3)
    shapes = {each["shape"]: each["count"] for each in products}
    assert shapes == {
        "[3, 100] x [100, 1000]": 1,
        "[3, 100] x [100, 120]": 2,
        "[3, 100] x [100, 60]": 4,
        "[3, 120] x [120, 100]": 2,
        "[3, 100] x [100, 200]": 4,
        "[3, 200] x [200, 100]": 2,
    }
    total_flops = sum(each["gflop_per_s"] * each["ms"] * 1e6 for each in products)
    assert total_flops == pytest.approx(2 * 3 * WEIGHTS)
    assert sum(each["gb_per_s"] * each["ms"] * 1e6 for each in products) == pytest.approx(4 * WEIGHTS)


def test_bytes_are_those_that_a_step_reads():
    norms = 4 * 5 * 100
    tied, apart = CONFIG, replace(CONFIG, tie_word_embeddings=False)
    for config in (tied, apart):
        params = init_params(config, jax.random.key(0))
        assert machine.read_bytes(config, params, 3) == 4 * WEIGHTS + norms
    experts = ExpertsConfig(num_experts=4, num_chosen=1, inner_size=200)
    mixed = replace(CONFIG, mlp_kinds=("dense", "experts"), experts=experts)
    params = init_params(mixed, jax.random.key(0))
    every = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Two rows leave an expert out with a chance of (3 / 4)^2.
    assert machine.read_bytes(mixed, params, 2) == pytest.approx(every - 4 * 4 * 3 * 100 * 200 * 9 / 16)


@pytest.mark.usefixtures("own_cache")
def test_limits_and_steps_are_measured(tiny_model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr(machine, "PEAK_SIZE", {"cpu": 64})
    output = tmp_path / "figures.json"
    words = (
        f"--model={tiny_model_dir}",
        "--dtypes=float32",
        "--slots=2",
        "--context=40",
        "--quantizations=none,int8,int8_channel",
    )
    main(["bench", "machine", *words, f"--output={output}"])
    document = json.loads(output.read_text())
    limits = {each["limit"]: each["value"] for each in document["limits"]}
    assert limits["matmul float32"] > 0 and limits["read, 1 thread"] > 0
    step, quantised, by_channel = document["results"]
    assert (step["dtype"], step["quantization"], step["slots"]) == ("float32", "none", 2)
    assert (quantised["quantization"], quantised["weight_dtype"]) == ("int8", "auto")
    assert by_channel["weights_mb"] < quantised["weights_mb"]
    # 8.5 bits in place of 32, but for an embedding whose columns are not in 32s, and norms.
    assert 0.26 < quantised["weights_mb"] / step["weights_mb"] < 0.6
    assert quantised["weights_ms"] / step["weights_ms"] == pytest.approx(quantised["weights_mb"] / step["weights_mb"])
    assert {each["form"] for each in document["matmuls"]} == {"float32", "8.32.symmetric.float16", "int8 by channel"}
    # Prompts may be read one after the other, beside rows that decode already.
    assert machine.STEPS <= step["steps_timed"] <= machine.STEPS + 2
    assert step["ratio_to_bound"] == pytest.approx(step["step_ms"] / step["bound_ms"]) and step["ratio_to_bound"] > 0
    products = [each["ms"] for each in document["matmuls"] if each["quantization"] == "none"]
    assert sum(products) == pytest.approx(step["matmuls_ms"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "machine: limits" in shown and "GFLOP/s" in shown
