"""bench machine: the bound, worked by hand, and a run on a tiny model."""

import json

import pytest

from jaxserve.bench import machine
from jaxserve.bench.__main__ import main
from jaxserve.models import ModelConfig, RopeConfig

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
    bound = machine.decode_bound(CONFIG, "bfloat16", 8, 50, gb_per_s=1.0, gflop_per_s=gflop_per_s)
    assert bound["weights_ms"] == pytest.approx(1e3 * 2 * WEIGHTS / 1e9)
    assert bound["flops_ms"] == pytest.approx(1e3 * 2 * 8 * WEIGHTS / (gflop_per_s * 1e9))
    # K and V of 8 rows, 50 tokens, 2 layers, 2 heads of 30, 2 bytes each.
    assert bound["kv_ms"] == pytest.approx(1e3 * 2 * 8 * 50 * 2 * 2 * 30 * 2 / 1e9)
    assert bound["bound_ms"] == pytest.approx(bound[bound_by] + bound["kv_ms"])


def test_products_are_those_of_a_step(monkeypatch):
    monkeypatch.setattr(machine, "TRIES", 1)
    products = machine.measure_matmuls(CONFIG, "float32", 3)
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


@pytest.mark.usefixtures("own_cache")
def test_limits_and_steps_are_measured(tiny_model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr(machine, "PEAK_SIZE", {"cpu": 64})
    output = tmp_path / "figures.json"
    words = (f"--model={tiny_model_dir}", "--dtypes=float32", "--slots=2", "--context=40")
    main(["bench", "machine", *words, f"--output={output}"])
    document = json.loads(output.read_text())
    limits = {each["limit"]: each["value"] for each in document["limits"]}
    assert limits["matmul float32"] > 0 and limits["read, 1 thread"] > 0
    (step,) = document["results"]
    assert (step["dtype"], step["slots"]) == ("float32", 2)
    # Prompts may be read one after the other, beside rows that decode already.
    assert machine.STEPS <= step["steps_timed"] <= machine.STEPS + 2
    assert step["ratio_to_bound"] == pytest.approx(step["step_ms"] / step["bound_ms"]) and step["ratio_to_bound"] > 0
    assert sum(each["ms"] for each in document["matmuls"]) == pytest.approx(step["matmuls_ms"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "machine: limits" in shown and "GFLOP/s" in shown
