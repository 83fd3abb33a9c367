"""What each family's config.json may ask, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxserve.core import UnsupportedModelError
from jaxserve.models import ignorable, model_config_from_hf, weights
from jaxserve.models.rope import inverse_frequencies
from tests.models.tiny_models import FOLDER


def config(name, *, without=(), **changes):
    """The ModelConfig of a tiny model with fields of its config.json changed or left out."""
    hf = json.loads((FOLDER / name / "config.json").read_text()) | changes
    return model_config_from_hf({key: value for key, value in hf.items() if key not in without})


def test_late_layers_of_qwen_have_a_window_if_asked():
    windows = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
    for name in ("qwen2_bias", "qwen3_qknorm"):
        assert config(name, without=("layer_types",), **windows).sliding_windows == (None, 8, 8)
        unused = windows | {"use_sliding_window": False}
        assert config(name, without=("layer_types",), **unused).sliding_windows == (None,) * 3
        types = ["sliding_attention", "full_attention", "full_attention"]
        assert config(name, **windows | {"layer_types": types}).sliding_windows == (8, None, None)


def test_gemma_windows_follow_from_the_pattern_where_no_types_are_given():
    assert config("gemma2_softcap", without=("layer_types",)).sliding_windows == (8, None, 8, None)
    assert config("gemma3_dual_rope", without=("layer_types",)).sliding_windows == (8, 8, None, 8, 8, None)


def test_gemma_2_has_its_own_defaults_and_null_turns_a_cap_off():
    left_out = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation")
    found = config("gemma2_softcap", without=(*left_out, "tie_word_embeddings", "sliding_window"))
    assert (found.attention_softcap, found.final_logit_softcap, found.attention_scale) == (50.0, 30.0, 1 / 16)
    assert found.hidden_act == "gelu_pytorch_tanh" and found.tie_word_embeddings
    assert found.sliding_windows[0] == 4096
    off = config("gemma2_softcap", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert off.attention_softcap is None and off.final_logit_softcap is None


def test_gemma_3_scales_the_rope_of_layers_that_see_all_only():
    linear = {"rope_type": "linear", "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 1e4}
    new = config(
        "gemma3_dual_rope",
        rope_parameters={"full_attention": {**linear, "rope_theta": 1e6}, "sliding_attention": local},
    )
    older = config(
        "gemma3_dual_rope",
        without=("rope_parameters", "layer_types"),
        rope_scaling=linear,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    )
    for found in (new, older):
        assert found.layer_ropes == (1, 1, 0, 1, 1, 0)
        last, first = (inverse_frequencies(rope, 16, 512) for rope in found.ropes)
        np.testing.assert_allclose(last, 1e6 ** -(np.arange(8) / 8) / 8)
        np.testing.assert_allclose(first, 1e4 ** -(np.arange(8) / 8))


def test_phi_may_have_a_window_and_turn_a_part_of_each_head():
    found = config("phi3_fused", sliding_window=8, partial_rotary_factor=0.75, rope_parameters=None, rope_theta=5e3)
    assert found.sliding_windows == (8, 8, 8)
    assert (found.rope.partial_rotary_factor, found.rope.theta) == (0.75, 5e3)


def test_multipliers_of_granite_are_one_where_missing():
    left_out = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    found = config("granite_multipliers", without=left_out)
    assert (found.attention_scale, found.embedding_multiplier) == (1.0, 1.0)
    assert (found.residual_multiplier, found.logits_divisor) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2_softcap", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True.*only causal"),
        ("gemma3_dual_rope", {"hidden_activation": "sine"}, "hidden_activation 'sine' is not supported; supported are"),
        (
            "qwen2_bias",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "'chunked_attention'",
        ),
        ("qwen3_qknorm", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 3"),
        (
            "qwen2_bias",
            {"rope_parameters": {"rope_type": "mrope"}},
            "rope type 'mrope' is not supported; supported are",
        ),
        ("phi3_fused", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' needs short_factor, long_factor"),
        ("olmo2_postnorm", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "entry for full_attention"),
        ("deepseek_v3_mla", {"kv_lora_rank": None}, "no kv_lora_rank"),
        ("deepseek_v3_mla", {"v_head_dim": 0}, "v_head_dim is 0; latent attention needs a positive integer"),
        ("deepseek_v3_mla", {"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported"),
        (
            "deepseek_v3_mla",
            {"topk_method": "greedy"},
            "topk_method is 'greedy', which is not supported; 'noaux_tc' is",
        ),
        ("deepseek_v3_mla", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; rotary embedding needs an even number"),
        ("deepseek_v3_mla", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\).*weight_block_size"),
        ("starcoder2_layernorm", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm', which is not supported; 'layer"),
        ("starcoder2_layernorm", {"mlp_type": "gated"}, "mlp_type is 'gated', which is not supported; 'default' is"),
        ("smollm3_nope", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries; num_hidden_layers is 8"),
        ("granite_multipliers", {"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
    ],
)
def test_what_a_config_asks_and_is_not_supported_is_named(name, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config(name, **changes)


def test_deepseek_has_one_head_of_latents_and_yarns_temperature_in_its_scale():
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    found = config("deepseek_v3_mla", rope_parameters=None, rope_scaling=yarn, rope_theta=1e4, rope_interleave=False)
    assert (found.num_kv_heads, found.head_dim, found.value_dim, found.rope_head_dim) == (1, 24, 16, 8)
    temperature = 1 + 0.1 * np.log(40)
    assert found.rope.attention_factor == 1.0 and not found.rope_interleaved
    assert found.attention_scale == pytest.approx(24**-0.5 * temperature**2)
    without = config("deepseek_v3_mla", rope_parameters=None, rope_scaling=yarn | {"mscale_all_dim": 0})
    assert without.attention_scale == pytest.approx(24**-0.5)
    assert without.rope.attention_factor == pytest.approx(temperature)
    assert config("deepseek_v3_mla", q_lora_rank=None).latent.q_lora_rank is None


def test_layers_for_several_tokens_at_once_are_not_read():
    found = config("deepseek_v3_mla", num_nextn_predict_layers=1)
    assert ignorable(found, "model.layers.3.eh_proj.weight") and ignorable(found, "model.layers.3.mlp.gate.weight")
    assert not ignorable(found, "model.layers.4.eh_proj.weight") and not ignorable(found, "model.layers.2.x.weight")
    assert not ignorable(config("deepseek_v3_mla", num_nextn_predict_layers=0), "model.layers.3.eh_proj.weight")


def test_a_model_with_images_is_refused():
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration is not supported; supported are"):
        config("gemma3_dual_rope", architectures=["Gemma3ForConditionalGeneration"])


# What the published config.json of each says of its shape; the counts are those of the published weights.
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "residual_dropout": 0.1,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def published(fields, shape, **more):
    return model_config_from_hf({**fields, **dict(zip(SHAPE, shape, strict=True)), **more})


def num_weights(config):
    return sum(math.prod(weight.shape) for weight in weights(config))


@pytest.mark.parametrize(
    ("shape", "more", "count", "tied"),
    [
        ((3072, 12288, 30, 24), {"num_key_value_heads": 2, "rope_theta": 999999.4420358813}, 3_030_371_328, True),
        ((4608, 18432, 32, 36), {"num_key_value_heads": 4, "rope_theta": 1000000}, 7_173_923_840, True),
        (
            (6144, 24576, 40, 48),
            {"num_key_value_heads": 4, "rope_theta": 100000, "tie_word_embeddings": False},
            15_957_889_024,
            False,
        ),
    ],
    ids=["3b", "7b", "15b"],
)
def test_published_starcoder_2(shape, more, count, tied):
    found = published(STARCODER2, shape, **more)
    assert num_weights(found) == count
    assert found.tie_word_embeddings == tied
    assert (found.norm_kind, found.rms_norm_eps, found.hidden_act) == ("layer", 1e-5, "gelu_pytorch_tanh")
    assert found.qkv_bias and found.o_bias and found.mlp_bias and set(found.mlp_kinds) == {"plain"}
    assert set(found.sliding_windows) == {4096} and found.head_dim == 128
    assert found.rope.theta == more["rope_theta"] and not found.rope_interleaved


@pytest.mark.parametrize(
    ("shape", "bias", "count"),
    [((4096, 13696, 40, 32), True, 9_400_279_040), ((6144, 23040, 61, 48), False, 32_566_081_536)],
    ids=["9b", "32b"],
)
def test_published_glm_4(shape, bias, count):
    found = published(GLM4, shape, attention_bias=bias)
    assert num_weights(found) == count
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (bias, False, False)
    assert (found.norm_placement, found.rope.partial_rotary_factor, found.rope_interleaved) == ("sandwich", 0.5, True)
    assert inverse_frequencies(found.rope, found.head_dim, 32768).shape == (32,)
    assert found.eos_token_ids == (151329, 151336, 151338)


def test_fields_that_a_config_of_these_families_leaves_out():
    found = config(
        "starcoder2_layernorm",
        without=("use_bias", "norm_epsilon", "tie_word_embeddings", "hidden_act", "num_key_value_heads"),
    )
    assert found == config("starcoder2_layernorm")
    assert config("starcoder2_layernorm", sliding_window=None).sliding_windows == (None, None)
    assert not config("starcoder2_layernorm", use_bias=False).mlp_bias
    left_out = ("rope_parameters", "attention_bias", "head_dim", "num_key_value_heads", "rms_norm_eps")
    found = config("glm4_interleaved", without=left_out)
    assert (found.rope.partial_rotary_factor, found.rope.theta, found.qkv_bias) == (0.5, 1e4, True)
    assert (found.head_dim, found.num_kv_heads, found.rms_norm_eps) == (128, 2, 1.5625e-07)


def test_published_smollm3():
    fields = {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    }
    found = published(fields, (2048, 11008, 36, 16))
    assert num_weights(found) == 3_075_098_624
    assert found.layer_ropes == (0, 0, 0, 1) * 9 and found.tie_word_embeddings
    assert found.rope.theta == 5e6
    assert inverse_frequencies(found.ropes[1], found.head_dim, 65536).size == 0


def test_smollm3_layers_without_rope_have_the_window_and_follow_from_the_interval():
    left_out = ("no_rope_layers", "layer_types")
    windows = {"use_sliding_window": True, "sliding_window": 8}
    found = config("smollm3_nope", without=left_out, no_rope_layer_interval=2, **windows)
    assert found.layer_ropes == (0, 1) * 4
    assert found.sliding_windows == (None, 8) * 4
    assert config("smollm3_nope", without=left_out) == config("smollm3_nope")
    assert config("smollm3_nope", without=("rope_parameters",)).rope.theta == 2e6
    assert config("smollm3_nope", without=("num_key_value_heads",)).num_kv_heads == 4
