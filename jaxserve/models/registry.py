"""From a checkpoint's config.json to a ModelConfig, by architecture name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.families import (
    deepseek_v3,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)

_FAMILIES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma2,
    gemma3,
    phi3,
    olmo2,
    granite,
    mixtral,
    qwen3_moe,
    gpt_oss,
    deepseek_v3,
    starcoder2,
    glm4,
    smollm3,
)
_BY_NAME = {name: family for family in _FAMILIES for name in (family.ARCHITECTURE, family.MODEL_TYPE)}

SUPPORTED_ARCHITECTURES = tuple(family.ARCHITECTURE for family in _FAMILIES)


def model_config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Args:
      hf: the parsed file; `architectures` decides, or `model_type` where it is missing.

    Raises:
      UnsupportedModelError: the architecture, its rope scaling, its activation or its quantisation is
        not supported, or a needed field is missing.
    """
    names = list(hf.get("architectures") or [])
    if not names and hf.get("model_type"):
        names = [hf["model_type"]]
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name].config_from_hf(hf)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names)) or '(none given)'} is not supported;"
        f" supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )
