"""Phi-3 and Phi-4: Llama's shape with fused projections, part of each head turning, longrope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, windows_of
from jaxserve.models.names import LLAMA_NAMES

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"

NAMES = LLAMA_NAMES.with_modules(
    {
        "attention.q_proj": "self_attn.qkv_proj",
        "attention.k_proj": "self_attn.qkv_proj",
        "attention.v_proj": "self_attn.qkv_proj",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    }
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A window, where there is one, is every layer's."""
    window = hf.get("sliding_window")
    return decoder_config(
        {"rms_norm_eps": 1e-5, **hf},
        ARCHITECTURE,
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: True),
        names=NAMES,
    )
