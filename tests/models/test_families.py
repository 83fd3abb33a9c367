"""What each family's config.json may ask, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.core import UnsupportedModelError
from jaxserve.models import ignorable, model_config_from_hf
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
