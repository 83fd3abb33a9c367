"""From config.json to ModelConfig, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.core import UnsupportedModelError
from jaxserve.models import model_config_from_hf

BASE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**changes):
    return model_config_from_hf({"architectures": ["LlamaForCausalLM"], **BASE, **changes})


def test_missing_fields_take_the_family_defaults():
    config = llama()
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 4, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-6, 10000.0, False)
    assert config.sliding_windows == (None, None)


def test_null_fields_count_as_missing():
    config = llama(head_dim=None, num_key_value_heads=None, rope_scaling=None, eos_token_id=None)
    assert (config.head_dim, config.num_kv_heads, config.rope.kind, config.eos_token_ids) == (4, 4, "default", ())


def test_eos_may_be_one_id_or_several():
    assert llama(eos_token_id=2).eos_token_ids == (2,)
    assert llama(eos_token_id=[2, 7]).eos_token_ids == (2, 7)


def test_model_type_decides_without_architectures():
    assert model_config_from_hf({"model_type": "llama", **BASE}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(("window", "wanted"), [(8, 8), (None, None)])
def test_mistral_window_is_every_layers(window, wanted):
    hf = {"architectures": ["MistralForCausalLM"], **BASE, "num_key_value_heads": 2, "sliding_window": window}
    assert model_config_from_hf(hf).sliding_windows == (wanted, wanted)


def test_unknown_architecture_names_the_supported_ones():
    with pytest.raises(UnsupportedModelError, match="BertModel is not supported; supported are LlamaForCausalLM, Mis"):
        model_config_from_hf({"architectures": ["BertModel"], **BASE})


def test_missing_size_is_named():
    with pytest.raises(UnsupportedModelError, match="no num_hidden_layers"):
        model_config_from_hf({"architectures": ["LlamaForCausalLM"], **BASE, "num_hidden_layers": None})


def test_inconsistent_heads_are_refused():
    with pytest.raises(UnsupportedModelError, match="query heads must be a multiple of KV heads"):
        llama(num_key_value_heads=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_placement": "middle"}, "norm_placement is 'middle'; supported are pre, post, sandwich"),
        ({"norm_kind": "batch"}, "norm_kind is 'batch'; supported are rms, layer"),
        ({"qk_norm": "token"}, "qk_norm is 'token'; supported are None, head, full"),
        ({"mlp_kinds": ("dense", "sparse")}, "mlp_kinds is 'sparse'; supported are dense"),
        ({"layer_ropes": (0, 1)}, r"layer_ropes is \(0, 1\) and there are 1 ropes"),
        ({"sliding_windows": (None,)}, "sliding_windows has 1 entries for 2 layers"),
    ],
)
def test_a_family_that_sets_a_field_wrongly_is_told(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(llama(), **changes)


def test_unknown_activation_is_refused():
    with pytest.raises(UnsupportedModelError, match="hidden_act 'sine' is not supported; supported are silu"):
        llama(hidden_act="sine")


def test_quantised_checkpoint_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\)"):
        llama(quantization_config={"quant_method": "gptq"})
