"""Qwen3: Qwen2 with every query and key head normalised, and without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag
from jaxserve.models.families.qwen2 import late_windows

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"

_DEFAULT_HEAD_DIM = 128


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The head dimension does not follow from the hidden size."""
    bias = flag(hf, "attention_bias")
    return decoder_config(
        hf,
        ARCHITECTURE,
        head_dim=int(hf.get("head_dim") or _DEFAULT_HEAD_DIM),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=late_windows(hf),
    )
