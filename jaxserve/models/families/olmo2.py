"""OLMo 2: norms after attention and MLP only, queries and keys normalised over all their heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag
from jaxserve.models.names import LLAMA_NAMES

ARCHITECTURE = "Olmo2ForCausalLM"
MODEL_TYPE = "olmo2"

NAMES = LLAMA_NAMES.with_modules(
    {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Every layer sees the whole context."""
    bias = flag(hf, "attention_bias")
    return decoder_config(
        {"rms_norm_eps": 1e-5, **hf},
        ARCHITECTURE,
        qkv_bias=bias,
        o_bias=bias,
        norm_placement="post",
        qk_norm="full",
        names=NAMES,
    )
