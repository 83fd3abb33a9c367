"""Llama and what shares its shape (SmolLM2, TinyLlama, Yi, Llama 3.x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Every layer sees the whole context; linear layers may carry biases."""
    bias = flag(hf, "attention_bias")
    return decoder_config(hf, ARCHITECTURE, qkv_bias=bias, o_bias=bias, mlp_bias=flag(hf, "mlp_bias"))
