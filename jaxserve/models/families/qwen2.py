"""Qwen2 and Qwen2.5: Llama's shape with biases on queries, keys and values, and windows in the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag, windows_of

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"

_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_WINDOWED = 28


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window` says so."""
    return decoder_config(hf, ARCHITECTURE, qkv_bias=True, sliding_windows=late_windows(hf))


def late_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The windows of Qwen2 and Qwen3."""
    window = hf.get("sliding_window", _DEFAULT_WINDOW) if flag(hf, "use_sliding_window") else None
    first = hf.get("max_window_layers", _DEFAULT_FIRST_WINDOWED)
    return windows_of(hf, None if window is None else int(window), lambda layer: layer >= first)
