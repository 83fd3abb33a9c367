"""Shapes of models as the roofline reads them from a config.json."""

import json
from pathlib import Path

import pytest

from jaxserve.config.flag_table import CHIPS as CHIP_NAMES
from jaxserve.sim.roofline import CHIPS, ModelShape

REPOSITORY = Path(__file__).parents[2]


def test_every_named_chip_is_known_and_the_shipped_models_have_their_size():
    assert set(CHIPS) == set(CHIP_NAMES)
    sizes = {"smollm2-135m": 134.5e6, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "qwen3-8b": 8.19e9}
    sizes |= {"qwen3-32b": 32.76e9, "qwen3-30b-a3b": 30.53e9, "gemma-3-27b": 27.01e9, "mixtral-8x7b": 46.70e9}
    sizes |= {"gpt-oss-120b": 116.8e9, "deepseek-v3": 671.0e9}
    paths = sorted((REPOSITORY / "configs" / "models").glob("*.json"))
    assert {path.stem for path in paths} == set(sizes)
    for name, size in sizes.items():
        shape = ModelShape.from_file(REPOSITORY / "configs" / "models" / f"{name}.json")
        assert shape.num_weights == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        # starcoder2-3b and gemma-2-2b as published: neither says that its embedding is tied.
        (("starcoder2", 3072, 12288, 24, 2, None, 49152, 30), 3.03e9),
        (("gemma2", 2304, 9216, 8, 4, 256, 256000, 26), 2.61e9),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_family_s_own_defaults_count(tmp_path, fields, size):
    names = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(names, fields, strict=True))))
    shape = ModelShape.from_file(tmp_path)
    assert shape.num_weights == pytest.approx(size, rel=2e-3)


def test_a_config_that_lacks_a_field_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    with pytest.raises(ValueError, match=r"config.json.qk_nope_head_dim is missing"):
        ModelShape.from_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"config.json.num_attention_heads is missing"):
        ModelShape.from_file(tmp_path)
