"""Reading of config.json fields that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ExpertsConfig, ModelConfig
from jaxserve.models.mlp import ACTIVATIONS
from jaxserve.models.rope import rope_config_from_hf

_SLIDING, _FULL = "sliding_attention", "full_attention"


def require(hf: Mapping[str, Any], name: str) -> Any:
    """The value of a field that has no sensible default.

    Raises:
      UnsupportedModelError: it is missing.
    """
    value = hf.get(name)
    if value is None:
        raise UnsupportedModelError(f"the model's config has no {name}; a decoder's config.json must give it")
    return value


def flag(hf: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean field; null counts as missing."""
    value = hf.get(name)
    return default if value is None else bool(value)


def optional_number(hf: Mapping[str, Any], name: str, default: float | None = None) -> float | None:
    """A number that may be null, which is not the same as missing."""
    value = hf.get(name, default)
    return None if value is None else float(value)


def refuse(hf: Mapping[str, Any], name: str, why: str) -> None:
    """Raises UnsupportedModelError if a field is set to anything but false, null or 0."""
    if hf.get(name):
        raise UnsupportedModelError(f"{name} is {hf[name]!r}, which is not supported: {why}")


def windows_of(hf: Mapping[str, Any], window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The sliding window of every layer.

    Args:
      hf: `layer_types` decides, where it is given.
      window: of the layers that have one; None: no layer has.
      is_sliding: whether a layer has one, where `layer_types` is not given.

    Raises:
      UnsupportedModelError: a layer type that is not known, or not one per layer.
    """
    count = int(require(hf, "num_hidden_layers"))
    types = hf.get("layer_types") or [_SLIDING if is_sliding(index) else _FULL for index in range(count)]
    unknown = [kind for kind in types if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise UnsupportedModelError(
            f"layer_types has {unknown[0]!r}, which is not supported; supported are {_SLIDING}, {_FULL}"
        )
    if len(types) != count:
        raise UnsupportedModelError(f"layer_types has {len(types)} entries; num_hidden_layers is {count}")
    return tuple(window if kind == _SLIDING else None for kind in types)


def experts_config(num_experts: int, num_chosen: int, inner_size: int, **changes: Any) -> ExpertsConfig:
    """What a family says of its experts; `changes` are further fields.

    Raises:
      UnsupportedModelError: the fields contradict each other.
    """
    try:
        return ExpertsConfig(num_experts, num_chosen, inner_size, **changes)
    except ValueError as error:
        raise UnsupportedModelError(f"the model's config is not usable: {error}") from error


def decoder_config(
    hf: Mapping[str, Any],
    architecture: str,
    *,
    activation_field: str = "hidden_act",
    default_activation: str = "silu",
    **changes: Any,
) -> ModelConfig:
    """The plain pre-norm decoder described by the usual field names.

    Args:
      hf: the configuration.
      architecture: name to keep.
      activation_field, default_activation: where the MLP's activation is, and what it is where nothing is.
      **changes: ModelConfig fields that the family sets itself.

    Raises:
      UnsupportedModelError: a needed field is missing or inconsistent, or something is not supported.
    """
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({method}); supported are float checkpoints, GGUF files, mxfp4 and"
            " fp8 with weight_block_size"
        )
    activation = hf.get(activation_field) or default_activation
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{activation_field} {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    hidden, heads = int(require(hf, "hidden_size")), int(require(hf, "num_attention_heads"))
    eos = hf.get("eos_token_id")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": int(require(hf, "vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(require(hf, "intermediate_size")),
        "num_layers": int(require(hf, "num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": int(hf.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope": changes.get("rope") or rope_config_from_hf(hf),
        "max_position_embeddings": int(hf.get("max_position_embeddings", 2048)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "hidden_act": activation,
        "bos_token_id": hf.get("bos_token_id"),
        "pad_token_id": hf.get("pad_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
    }
    try:
        return ModelConfig(**{**fields, **changes})
    except ValueError as error:
        raise UnsupportedModelError(f"the model's config is not usable: {error}") from error
