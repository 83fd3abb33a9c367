"""From a checkpoint's config.json to a ModelConfig, by architecture name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.core import CheckpointError, UnsupportedModelError
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

_MOST = {
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 10_000,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 100_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), 1 << 30),
}
"""More than any model has: a number beyond is damage, and would take the host's memory to list its tensors."""

SUPPORTED_ARCHITECTURES = tuple(family.ARCHITECTURE for family in _FAMILIES)


def model_config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Args:
      hf: the parsed file; `architectures` decides, or `model_type` where it is missing.

    Raises:
      UnsupportedModelError: the architecture, its rope scaling, its activation or its quantisation is
        not supported, or a needed field is missing.
      CheckpointError: a field is of another type or out of all bounds.
    """
    names = hf.get("architectures") or []
    if not isinstance(names, list | tuple):
        raise CheckpointError(f"config.json: architectures is {_shown(names)}; it must be a list of names")
    if not names and hf.get("model_type"):
        names = [hf["model_type"]]
    for name in names:
        if isinstance(name, str) and name in _BY_NAME:
            return _config_of(_BY_NAME[name], hf)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names)) or '(none given)'} is not supported;"
        f" supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


class _Watched(Mapping[str, Any]):
    """A configuration that knows which field was asked for last."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.last = ""

    def __getitem__(self, name: str) -> Any:
        self.last = name
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _config_of(family: Any, hf: Mapping[str, Any]) -> ModelConfig:
    for name, most in _MOST.items():
        value = hf.get(name)
        if isinstance(value, int | float) and not value <= most:
            raise CheckpointError(f"config.json: {name} is {_shown(value)}; it must be at most {most}")
    watched = _Watched(hf)
    try:
        config: ModelConfig = family.config_from_hf(watched)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        # Fields are taken as they come: whatever one of another type leads to, it is the last that was looked at.
        raise CheckpointError(
            f"config.json: {watched.last} is {_shown(hf.get(watched.last))}, which is not usable: {error}"
        ) from error
    return config


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
