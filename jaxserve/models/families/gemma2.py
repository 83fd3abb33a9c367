"""Gemma 2: norms around attention and MLP, soft caps, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag, optional_number, refuse, require, windows_of
from jaxserve.models.names import LLAMA_NAMES

ARCHITECTURE = "Gemma2ForCausalLM"
MODEL_TYPE = "gemma2"

NAMES = LLAMA_NAMES.with_modules(
    {
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
_DEFAULT_WINDOW = 4096


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The first layer has the window, the second has not, and so on."""
    window = hf.get("sliding_window", _DEFAULT_WINDOW)
    return gemma_config(
        hf,
        ARCHITECTURE,
        attention_softcap=optional_number(hf, "attn_logit_softcapping", 50.0),
        final_logit_softcap=optional_number(hf, "final_logit_softcapping", 30.0),
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: layer % 2 == 0),
    )


def gemma_config(hf: Mapping[str, Any], architecture: str, **changes: Any) -> ModelConfig:
    """What Gemma 2 and Gemma 3 share; arguments as for `decoder_config`."""
    refuse(hf, "use_bidirectional_attention", "only causal attention is")
    bias = flag(hf, "attention_bias")
    return decoder_config(
        hf,
        architecture,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        head_dim=int(hf.get("head_dim") or 256),
        num_kv_heads=int(hf.get("num_key_value_heads") or 4),
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        norm_placement="sandwich",
        norm_offset=True,
        attention_scale=float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        embedding_multiplier=float(require(hf, "hidden_size")) ** 0.5,
        names=NAMES,
        **changes,
    )
