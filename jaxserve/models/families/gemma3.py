"""Gemma 3, text only: Gemma 2's layers with normalised heads, and a rope of their own for windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.gemma2 import gemma_config
from jaxserve.models.families.hf_config import optional_number, windows_of
from jaxserve.models.rope import rope_config_from_hf

ARCHITECTURE = "Gemma3ForCausalLM"
MODEL_TYPE = "gemma3_text"

_DEFAULT_WINDOW = 4096
_DEFAULT_PATTERN = 6
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The last layer of every `sliding_window_pattern` sees all; context extension is for such layers only."""
    pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or _DEFAULT_PATTERN)
    window = int(hf.get("sliding_window") or _DEFAULT_WINDOW)
    windows = windows_of(hf, window, lambda layer: (layer + 1) % pattern != 0)
    rope, local_rope = _ropes(hf)
    return gemma_config(
        hf,
        ARCHITECTURE,
        qk_norm="head",
        attention_softcap=optional_number(hf, "attn_logit_softcapping"),
        final_logit_softcap=optional_number(hf, "final_logit_softcapping"),
        sliding_windows=windows,
        rope=rope,
        other_ropes=(local_rope,),
        layer_ropes=tuple(int(each is not None) for each in windows),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[Any, Any]:
    """Of layers that see all, and of the others: `rope_parameters` by layer type, or the older fields."""
    given = hf.get("rope_parameters") or {}
    if "full_attention" in given or "sliding_attention" in given:
        own, local = ({**hf, "rope_parameters": given.get(f"{kind}_attention")} for kind in ("full", "sliding"))
    else:
        own, local = hf, {"rope_theta": hf.get("rope_local_base_freq")}
    return (
        rope_config_from_hf(own, default_theta=_DEFAULT_THETA),
        rope_config_from_hf(local, default_theta=_DEFAULT_LOCAL_THETA),
    )
