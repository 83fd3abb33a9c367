"""Llama and what shares its shape (SmolLM2, TinyLlama, Yi, Llama 3.x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Every layer sees the whole context; linear layers may carry biases."""
    return decoder_config(
        hf,
        ARCHITECTURE,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )
