"""LoRA adapters in PEFT's layout: what is read, and what is refused, by file and tensor."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core import AdapterNotFoundError, CheckpointError, UnsupportedModelError
from jaxserve.loading import model_config_of, resolve_model
from jaxserve.loading.lora import MAX_CONFIG_BYTES, read_lora
from jaxserve.models import LoraPair
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.models.tiny_models import FOLDER

PREFIX = "base_model.model.model.layers"
UP = f"{PREFIX}.1.mlp.up_proj"


@pytest.fixture(scope="module")
def config(tiny_model_dir):
    return model_config_of(resolve_model(str(tiny_model_dir)))


@pytest.fixture
def adapter(tmp_path, tiny_model_dir):
    return write_tiny_lora(tmp_path / "adapter", tiny_model_dir, rank=3, alpha=6)


def read(path, config, **settings):
    return read_lora(
        str(path), config, **{"dtype": "float32", "rank": 8, "max_lora_rank": 8, "stacked": False} | settings
    )


def rewrite(adapter, change):
    """Changes the tensors of an adapter."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def configure(adapter, **fields):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_pairs_are_turned_scaled_and_filled_up(adapter, config):
    stored = load_file(adapter / "adapter_model.safetensors")
    pair = read(adapter, config)[1]["mlp"]["up_proj"]
    assert pair.a.shape == (64, 8) and pair.b.shape == (8, 128)
    np.testing.assert_array_equal(pair.a[:, :3], stored[f"{UP}.lora_A.weight"].T)
    np.testing.assert_allclose(pair.b[:3], stored[f"{UP}.lora_B.weight"].T * 2, rtol=1e-6)
    assert not pair.a[:, 3:].any() and not pair.b[3:].any()


def test_stacked_arrays_are_those_of_the_layers(adapter, config):
    layers, stacked = read(adapter, config), read(adapter, config, stacked=True)
    for index, layer in enumerate(layers):
        jax.tree.map(np.testing.assert_array_equal, layer, jax.tree.map(lambda leaf: leaf[index], stacked))  # noqa: B023


def test_what_an_adapter_lacks_is_zero(tmp_path, tiny_model_dir, config):
    write_tiny_lora(tmp_path / "a", tiny_model_dir, targets=("v_proj",), layers=[0])
    first, second = read(tmp_path / "a", config)
    assert first["attention"]["v_proj"].b.any()
    first["attention"]["v_proj"] = second["attention"]["v_proj"]
    assert not any(leaf.any() for leaf in jax.tree.leaves([first, second]))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_dtypes_and_the_names_of_older_files(adapter, config, dtype):
    want = read(adapter, config, dtype="bfloat16")
    # The library cannot name bfloat16; its bits are those of the numbers all the same.
    if dtype is not ml_dtypes.bfloat16:
        rewrite(adapter, lambda tensors: tensors.update({key: value.astype(dtype) for key, value in tensors.items()}))
    rewrite(adapter, lambda t: [t.update({k.replace(".weight", ".default.weight"): t.pop(k)}) for k in list(t)])
    for one, other in zip(jax.tree.leaves(read(adapter, config, dtype="bfloat16")), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.02, atol=1e-3)


def test_ranks_and_scales_by_module(tmp_path, tiny_model_dir, config):
    """Patterns name a module, or the end of its name; rank-stabilised scales go with the root."""
    patterns = {"rank_pattern": {"^model.layers.0.mlp.up_proj": 2}, "alpha_pattern": {"1.mlp.up_proj": 5}}
    path = write_tiny_lora(tmp_path / "a", tiny_model_dir, rank=4, alpha=8, use_rslora=True)
    rewrite(
        path,
        lambda tensors: tensors.update(
            {
                f"{PREFIX}.0.mlp.up_proj.lora_A.weight": np.ones((2, 64), np.float32),
                f"{PREFIX}.0.mlp.up_proj.lora_B.weight": np.ones((128, 2), np.float32),
                f"{UP}.lora_B.weight": np.ones((128, 4), np.float32),
            }
        ),
    )
    configure(path, **patterns)
    first, second = (layer["mlp"]["up_proj"] for layer in read(path, config))
    np.testing.assert_allclose(first.b[:2], 8 / np.sqrt(2), rtol=1e-6)
    assert not first.a[:, 2:].any()
    np.testing.assert_allclose(second.b[:4], 5 / 2, rtol=1e-6)


def test_a_tree_has_a_pair_for_every_matrix(adapter, config):
    pairs = jax.tree.leaves(read(adapter, config), is_leaf=lambda node: isinstance(node, LoraPair))
    assert len(pairs) == 7 * config.num_layers and all(isinstance(pair, LoraPair) for pair in pairs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True; LoRA pairs of q_proj, .* without bias are supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .'lm_head'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has 'embed_tokens'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA is supported"),
        ({"rank_pattern": {".*q_proj|k_proj": 2}}, "rank_pattern has .* other expressions are not"),
        ({"r": 9}, r"has rank 9; the limit is 8 \(max_lora_rank\)"),
    ],
)
def test_what_is_not_supported_is_named(adapter, config, fields, message):
    configure(adapter, **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        read(adapter, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": None}, "r is None; it must be a positive integer"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is .1.; it must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj is 0"),
        ({"r": 4}, r"q_proj.lora_A.weight has shape \[3, 64\]; it must be \[4, 64\]"),
        ({"padding": "x" * MAX_CONFIG_BYTES}, "the limit is 1048576"),
    ],
)
def test_a_damaged_configuration_is_named(adapter, config, fields, message):
    configure(adapter, **fields)
    with pytest.raises(CheckpointError, match=message):
        read(adapter, config)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, shape, value=1.0):
    return lambda tensors: tensors.update({name: np.full(shape, value, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{UP}.lora_A.weight"), "lacks lora_A of model.layers.1.mlp.up_proj"),
        (drop(f"{UP}.lora_B.weight"), "lacks lora_B of model.layers.1.mlp.up_proj"),
        (put(f"{UP}.lora_B.weight", (64, 3)), rf"tensor {UP}.lora_B.weight has shape \[64, 3\]; it must be \[128, 3\]"),
        (put(f"{UP}.lora_B.weight", (128, 3), np.nan), "lora_B.weight has numbers that are not finite in float32"),
        (put(f"{UP}.lora_B.weight", (128, 3), 3e38), "lora_B.weight has numbers that are not finite in float32"),
        (put(f"{PREFIX}.2.mlp.up_proj.lora_A.weight", (3, 64)), "layers.2.mlp.up_proj.lora_A.weight has no use"),
        (put(f"{UP}.lora_magnitude_vector", (128,)), "lora_magnitude_vector has no use in this model"),
        (put("base_model.model.lm_head.weight", (4, 4)), "lm_head.weight has no use in this model"),
        (put(f"{UP}.lora_A.default.weight", (3, 64)), "is there twice, also as"),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_damaged_tensors_are_named(adapter, config, change, message):
    rewrite(adapter, change)
    with pytest.raises(CheckpointError, match=message) as failed:
        read(adapter, config)
    assert str(adapter / "adapter_model.safetensors") in str(failed.value)


def test_integers_are_refused(adapter, config):
    rewrite(adapter, lambda tensors: tensors.update({f"{UP}.lora_A.weight": np.ones((3, 64), np.int8)}))
    with pytest.raises(CheckpointError, match="has dtype I8; it must be one of F64, F32"):
        read(adapter, config)


@pytest.mark.parametrize("kept", [0, 5, 100, -4])
def test_a_file_cut_short_is_named(adapter, config, kept):
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{file} has .* cut short"):
        read(adapter, config)


def test_a_file_that_is_larger_than_any_adapter_is_not_read(adapter, config):
    file = adapter / "adapter_model.safetensors"
    with file.open("ab") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=r"has 1073741824 bytes; an adapter of this model has at most"):
        read(adapter, config)


def test_what_is_missing_is_told(adapter, config, tmp_path):
    with pytest.raises(AdapterNotFoundError, match=r"adapter_config\.json is missing"):
        read(tmp_path / "nowhere", config)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(
        AdapterNotFoundError, match=r"adapter_model\.safetensors is missing; .* must be converted first"
    ):
        read(adapter, config)


def test_modules_that_share_a_tensor_have_its_rows(tmp_path):
    config = model_config_of(resolve_model(str(FOLDER / "phi3_fused")))
    widths = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, config.hidden_size), np.float32)
    b = rng.standard_normal((sum(widths), 2), np.float32)
    module = f"{PREFIX}.0.self_attn.qkv_proj"
    tmp_path.joinpath("adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["qkv_proj"], "bias": "none"})
    )
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    attention = read(tmp_path, config)[0]["attention"]
    parts = [attention[name] for name in ("q_proj", "k_proj", "v_proj")]
    for pair, part in zip(parts, np.split(b, np.cumsum(widths)[:-1]), strict=True):
        np.testing.assert_array_equal(pair.a[:, :2], a.T)
        np.testing.assert_array_equal(pair.b[:2], part.T)
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b[1:]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"qkv_proj.lora_B.weight has shape \[{len(b) - 1}, 2\]"):
        read(tmp_path, config)
