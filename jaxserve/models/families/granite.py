"""Granite 3: Llama's shape with multipliers of embeddings, scores, residual stream and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag

ARCHITECTURE = "GraniteForCausalLM"
MODEL_TYPE = "granite"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A multiplier that is missing is 1, that of the scores too."""
    bias = flag(hf, "attention_bias")
    return decoder_config(
        hf,
        ARCHITECTURE,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        embedding_multiplier=float(hf.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(hf.get("residual_multiplier", 1.0)),
        logits_divisor=float(hf.get("logits_scaling", 1.0)),
    )
