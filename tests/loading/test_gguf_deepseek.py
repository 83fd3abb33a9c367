"""DeepSeek-V3 from GGUF: both forms of keys and values, what published files say, and what is refused."""

import json
import math
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GgufFile, GgufTensor
from jaxserve.loading.gguf_metadata import model_metadata
from jaxserve.loading.gguf_reader import GgufReader
from jaxserve.loading.gguf_writer import differences
from jaxserve.models import forward, unembed
from jaxserve.models.registry import model_config_from_hf
from pallas_kernels.matmul import QuantisedMatrix, ScaledMatrix
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER, changed, dense_attend

TINY = FOLDER / "deepseek_v3_mla"

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The published config of DeepSeek-V3."""

OLD_METADATA = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 61,
    "deepseek2.context_length": 163840,
    "deepseek2.embedding_length": 7168,
    "deepseek2.feed_forward_length": 18432,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.head_count_kv": 128,
    "deepseek2.rope.freq_base": 10000.0,
    "deepseek2.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "deepseek2.expert_used_count": 8,
    "deepseek2.leading_dense_block_count": 3,
    "deepseek2.vocab_size": 129280,
    "deepseek2.attention.q_lora_rank": 1536,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
    "deepseek2.expert_feed_forward_length": 2048,
    "deepseek2.expert_count": 256,
    "deepseek2.expert_shared_count": 1,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 40.0,
    "deepseek2.rope.scaling.original_context_length": 4096,
    "deepseek2.rope.scaling.yarn_log_multiplier": float(np.float32(0.1)),
}
"""What files of DeepSeek-V3 say that were made before keys and values were apart."""
NEW_METADATA = OLD_METADATA | {
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
    "deepseek2.expert_group_count": 8,
    "deepseek2.expert_group_used_count": 4,
    "deepseek2.rope.scaling.yarn_beta_fast": 32.0,
    "deepseek2.rope.scaling.yarn_beta_slow": 1.0,
}

KEYS, BOTH = "blk.0.attn_k_b.weight", "blk.0.attn_kv_b.weight"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def config_of(metadata, *, form="fused"):
    """The config of a file with those metadata and as many tensors as its layers need at least."""
    names = ["token_embd.weight", "output.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(61))]
    names += {"separate": [KEYS], "fused": [BOTH], "mixed": [KEYS, BOTH]}[form]
    shape = (129280, 7168)
    tensors = {name: GgufTensor(Path("m.gguf"), Quant.F32, shape, 0, 4 * math.prod(shape)) for name in names}
    return model_config_from_hf(hf_config(GgufFile(Path("m.gguf"), metadata, tensors), {}))


def load(path, **settings):
    return load_model(resolve_model(str(path)), "float32", **settings)


OF_TOKENIZER = {"bos_token_id", "pad_token_id"}
"""What a file without a tokenizer does not say."""


def differing(one, other):
    return set(differences(one.config, other.config))


def last_logits(model):
    golden = json.loads((TINY / "golden.json").read_text())
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)
    hidden, _ = forward(model.config, model.params, ids, jnp.arange(ids.size), dense_attend, None)
    return unembed(model.config, model.params, hidden[-1:])[0], golden["logits_last"]


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_both_forms_give_the_weights_and_the_golden_logits(tmp_path, form):
    path = write_family(tmp_path / "m.gguf", TINY, latents=form)
    held = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert ("blk.1.attn_kv_b.weight" in held) == (form == "fused")
    original, found = load(TINY), load(path)
    for left, right in zip(jax.tree.leaves(original.params), jax.tree.leaves(found.params), strict=True):
        np.testing.assert_array_equal(left, right)
    assert differing(original, found) == OF_TOKENIZER
    np.testing.assert_allclose(*last_logits(found), rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", ["separate", "fused"])
@pytest.mark.parametrize("output", ["safetensors", "m.gguf"])
def test_both_forms_are_converted_to_the_same_bits(tmp_path, form, output):
    path = write_family(tmp_path / "there.gguf", TINY, latents=form)
    kind = "gguf" if output == "m.gguf" else output
    back = convert_checkpoint(Conversion(str(path), tmp_path / output, kind))
    for left, right in zip(jax.tree.leaves(load(TINY).params), jax.tree.leaves(load(back).params), strict=True):
        np.testing.assert_array_equal(left, right)
    if output == "safetensors":
        written = json.loads((back / "config.json").read_text())
        assert "latent_tensors" not in written
        wanted = json.loads((TINY / "config.json").read_text())
        shared = [key for key in wanted if key in written and key not in ("eos_token_id", "rms_norm_eps")]
        assert {key: written[key] for key in shared} == {**{key: wanted[key] for key in shared}}
        assert {"n_routed_experts", "kv_lora_rank", "v_head_dim", "n_group", "first_k_dense_replace"} <= set(shared)


@pytest.mark.parametrize(("metadata", "form"), [(OLD_METADATA, "fused"), (NEW_METADATA, "separate")])
def test_what_published_files_say_is_deepseek_v3(metadata, form):
    found, wanted = config_of(metadata, form=form), model_config_from_hf(V3)
    assert not differences(wanted, found)
    assert (found.experts.num_groups, found.experts.num_groups_chosen) == (8, 4)
    assert found.attention_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert found.rope.attention_factor == 1.0
    assert found.mlp_kinds == ("dense",) * 3 + ("experts",) * 58
    assert found.latent == wanted.latent


def test_metadata_of_deepseek_v3_are_those_of_published_files():
    written = model_metadata(model_config_from_hf(V3), [])
    assert written.keys() == NEW_METADATA.keys()
    for key, value in NEW_METADATA.items():
        assert written[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_other_numbers_of_experts_are_in_one_group_where_nothing_is_said():
    found = config_of({**OLD_METADATA, "deepseek2.expert_count": 384})
    assert (found.experts.num_groups, found.experts.num_groups_chosen) == (1, 1)


@pytest.mark.parametrize("multiplier", [0.0707, 0.1])
def test_yarn_of_a_tiny_model_goes_through_a_file(tmp_path, multiplier):
    rope = {**YARN, "mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    folder = changed(tmp_path / "hf", "deepseek_v3_mla", rope_parameters=rope)
    wanted = load(folder)
    theirs = load(write_family(tmp_path / "t.gguf", folder))
    ours = load(convert_checkpoint(Conversion(str(folder), tmp_path / "o.gguf", "gguf")))
    logits, of_no_yarn = last_logits(wanted)
    assert float(jnp.abs(logits - jnp.asarray(of_no_yarn)).max()) > 1e-3
    for found in (theirs, ours):
        assert found.config.attention_scale == pytest.approx(wanted.config.attention_scale, rel=1e-6)
        assert differing(wanted, found) <= OF_TOKENIZER
        np.testing.assert_allclose(last_logits(found)[0], logits, rtol=0, atol=1e-5)


def test_queries_without_a_latent_are_read_and_written(tmp_path):
    def tensors(found):
        queries = np.random.default_rng(0).normal(size=(96, 64), scale=0.05).astype(np.float32)
        kept = {name: value for name, value in found.items() if ".q_a_" not in name and ".q_b_" not in name}
        names = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3))
        return {**kept, **dict.fromkeys(names, queries)}

    folder = changed(tmp_path / "hf", "deepseek_v3_mla", tensors=tensors, q_lora_rank=None)
    wanted = load(folder)
    for path in (
        write_family(tmp_path / "t.gguf", folder),
        convert_checkpoint(Conversion(str(folder), tmp_path / "o.gguf", "gguf")),
    ):
        found = load(path)
        assert differing(wanted, found) <= OF_TOKENIZER
        for left, right in zip(jax.tree.leaves(wanted.params), jax.tree.leaves(found.params), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 1}, "not chosen by sigmoid scores .* DeepSeek-V2 is not"),
        ({"expert_gating_func": None}, "not chosen by sigmoid scores"),
        ({"attention.temperature_scale": 0.1}, "temperature_scale is 0.1, which is not supported"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers is 1, which is not supported"),
        ({"rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier 0 .* a multiplier is needed"),
        ({"rope.scaling.attn_factor": 0.5}, "factors of 1"),
        ({"rope.scaling.type": "linear"}, "rope type 'linear' is not supported over latents"),
        ({"attention.key_length": 64}, "qk_nope_head_dim is 0"),
    ],
)
def test_what_is_not_deepseek_v3_is_refused(changes, message):
    changed = {**OLD_METADATA, **{f"deepseek2.{key}": value for key, value in changes.items()}}
    with pytest.raises(UnsupportedModelError, match=message):
        config_of({key: value for key, value in changed.items() if value is not None})


def test_a_file_with_both_forms_is_refused():
    with pytest.raises(UnsupportedModelError, match="attn_kv_b and attn_k_b in one file are not supported"):
        config_of(NEW_METADATA, form="mixed")


@pytest.mark.parametrize("quant", [None, Quant.Q8_0])
def test_parts_of_keys_and_values_are_those_of_the_whole(tmp_path, quant):
    reader = GgufReader(write_family(tmp_path / "m.gguf", wide(tmp_path / "hf"), quant=quant))
    for name in ("k_b_proj", "v_b_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        whole = reader.read(name)
        assert whole.shape == (4, 32, 32)
        for part in ((slice(1, 3),), (slice(2, 4), slice(5, 20)), (slice(0, 1), slice(None), slice(3, 31))):
            np.testing.assert_array_equal(reader.read(name, part), whole[part])


def test_damaged_metadata_are_named():
    for key, value, message in (
        ("kv_lora_rank", None, "lacks the metadata deepseek2.attention.kv_lora_rank"),
        ("kv_lora_rank", "x", "attention.kv_lora_rank is 'x'; it must be an integer"),
    ):
        metadata = {**OLD_METADATA, f"deepseek2.attention.{key}": value}
        with pytest.raises(CheckpointError, match=message):
            config_of(metadata)
    with pytest.raises(CheckpointError, match="expert_weights_norm is 1; it must be true or false"):
        config_of({**OLD_METADATA, "deepseek2.expert_weights_norm": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_interleave": False}, "another rope_interleaved"),
        ({"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}}, "another rope;"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "a multiplier is needed"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supported over latents"),
        ({"hidden_act": "gelu"}, "another hidden_act"),
    ],
)
def test_what_a_file_cannot_say_is_not_written(tmp_path, fields, message):
    folder = changed(tmp_path / "hf", "deepseek_v3_mla", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        convert_checkpoint(Conversion(str(folder), tmp_path / "m.gguf", "gguf"))
    assert not (tmp_path / "m.gguf").exists()


def test_biases_of_attention_are_not_written(tmp_path):
    sizes = {"q_a_proj": 24, "kv_a_proj_with_mqa": 24, "o_proj": 64}

    def tensors(found):
        names = [
            (f"model.layers.{layer}.self_attn.{name}.bias", size) for layer in range(3) for name, size in sizes.items()
        ]
        return {**found, **{name: np.ones(size, np.float32) for name, size in names}}

    folder = changed(tmp_path / "hf", "deepseek_v3_mla", tensors=tensors, attention_bias=True)
    assert load(folder).config.qkv_bias
    with pytest.raises(UnsupportedModelError, match="another qkv_bias, o_bias"):
        convert_checkpoint(Conversion(str(folder), tmp_path / "m.gguf", "gguf"))


WIDE = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}


def wide(folder):
    """The tiny model with sizes that blocks of 32 and native products take."""
    rng = np.random.default_rng(0)
    sizes = {
        "q_a_proj": (32, 64),
        "q_a_layernorm": (32,),
        "q_b_proj": (256, 32),
        "kv_a_proj_with_mqa": (64, 64),
        "kv_a_layernorm": (32,),
        "kv_b_proj": (256, 32),
        "o_proj": (64, 128),
    }

    def tensors(found):
        for name in found:
            if ".self_attn." in name:
                size = sizes[name.split(".")[-2]]
                found[name] = (rng.normal(size=size) * 0.1 + (len(size) == 1)).astype(np.float32)
        return found

    return changed(folder, "deepseek_v3_mla", tensors=tensors, **WIDE)


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_blocks_are_kept_but_for_the_products_per_head(tmp_path, form):
    path = write_family(tmp_path / "m.gguf", wide(tmp_path / "hf"), quant=Quant.Q8_0, latents=form)
    dense, kept = load(path), load(path, quantization="gguf")
    attention = kept.params["layers"][1]["attention"]
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "o_proj"):
        assert isinstance(attention[name]["kernel"], QuantisedMatrix | ScaledMatrix), name
    for name in ("k_up", "v_up"):
        np.testing.assert_array_equal(attention[name]["kernel"], dense.params["layers"][1]["attention"][name]["kernel"])
    found, wanted = last_logits(kept)[0], last_logits(dense)[0]
    assert float(jnp.abs(found - wanted).max()) < 0.05 * float(jnp.std(wanted))
