"""Mistral: Llama's shape with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, windows_of

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"

_DEFAULT_WINDOW = 4096
_DEFAULT_KV_HEADS = 8


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A missing `sliding_window` means the family's default; null means none."""
    window = hf.get("sliding_window", _DEFAULT_WINDOW)
    return decoder_config(
        hf,
        ARCHITECTURE,
        num_kv_heads=int(hf.get("num_key_value_heads") or _DEFAULT_KV_HEADS),
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: True),
    )
