"""GLM-4 of 2025 (GLM-4-0414): norms around attention and MLP, half of each head turns, neighbours together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag
from jaxserve.models.names import LLAMA_NAMES

ARCHITECTURE = "Glm4ForCausalLM"
MODEL_TYPE = "glm4"

NAMES = LLAMA_NAMES.with_modules(
    {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    }
)
_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Every layer sees the whole context; `attention_bias` is of queries, keys and values alone."""
    return decoder_config(
        {**_DEFAULTS, **hf},
        ARCHITECTURE,
        rope_interleaved=True,
        norm_placement="sandwich",
        qkv_bias=flag(hf, "attention_bias", True),
        names=NAMES,
    )
