"""Reading of config.json fields that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import rope_config_from_hf

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def require(hf: Mapping[str, Any], name: str) -> Any:
    """The value of a field that has no sensible default.

    Raises:
      UnsupportedModelError: it is missing.
    """
    value = hf.get(name)
    if value is None:
        raise UnsupportedModelError(f"the model's config has no {name}; a decoder's config.json must give it")
    return value


def decoder_config(hf: Mapping[str, Any], architecture: str, **changes: Any) -> ModelConfig:
    """The plain pre-norm decoder described by the usual field names.

    Args:
      hf: the configuration.
      architecture: name to keep.
      **changes: ModelConfig fields that the family sets itself.

    Raises:
      UnsupportedModelError: a needed field is missing or inconsistent, or something is not supported.
    """
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is quantised ({method}); supported are float checkpoints and GGUF files"
        )
    activation = hf.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
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
        "rope": rope_config_from_hf(hf),
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
