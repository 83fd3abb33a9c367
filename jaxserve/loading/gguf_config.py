"""GGUF metadata as a Hugging Face configuration, and GGUF tensor names as Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.gguf_architectures import ARCHITECTURES, GgufArchitecture
from jaxserve.loading.gguf_fields import GgufFields
from jaxserve.loading.gguf_file import GgufFile

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
WITHOUT_SUFFIX = {"self_attn.sinks": "weight", "mlp.gate.e_score_correction_bias": "bias"}
"""Modules of a layer that are a tensor's whole name, and what GGUF's ends with."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str, arch: GgufArchitecture) -> str:
    """The Hugging Face name of a tensor, with `{}` for the expert; names without one stay as they are."""
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    module = arch.module(match[2]) if match else None
    if match and module:
        suffix = "" if module in WITHOUT_SUFFIX else f".{match[3]}"
        return f"model.layers.{match[1]}.{module}{suffix}"
    return TOP_NAMES.get(gguf_name, gguf_name)


def architecture(gguf: GgufFile) -> GgufArchitecture:
    """The architecture of a file.

    Raises:
      UnsupportedModelError: it is not known.
    """
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        # Imported for the message alone: the tokenizer reads this file's metadata without loading jax.
        from jaxserve.models import SUPPORTED_ARCHITECTURES

        supported = [known for known, arch in ARCHITECTURES.items() if arch.hf_architecture in SUPPORTED_ARCHITECTURES]
        raise UnsupportedModelError(
            f"{gguf.path}: GGUF architecture {name!r} is not supported; supported are {', '.join(supported)}"
        )
    return ARCHITECTURES[name]


def hf_config(gguf: GgufFile, rope_factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """A config.json for the model of a GGUF file.

    Args:
      gguf: the file.
      rope_factors: values of the tensors among `ROPE_TENSORS` that it holds.

    Raises:
      CheckpointError: a needed value is missing.
      UnsupportedModelError: layers differ from each other, or a mixture of experts that is not known.
    """
    arch = architecture(gguf)
    fields = GgufFields(gguf)
    heads = fields.count("attention.head_count")
    width = fields.count("embedding_length")
    layers = fields.count("block_count")
    head_dim = fields.count("attention.key_length", width // max(heads, 1))
    sizes = {"attention.head_count": heads, "embedding_length": width, "attention.key_length": head_dim}
    for key, size in sizes.items():
        if size < 1:
            raise CheckpointError(f"{gguf.path}: {key} is {size}; it must be positive")
    if not 1 <= layers <= len(gguf.tensors):
        raise CheckpointError(f"{gguf.path}: block_count is {layers}; the file has {len(gguf.tensors)} tensors")
    if not arch.has_latents and fields.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: key and value heads differ in size, which is not supported")
    num_experts = fields.count("expert_count", 0)
    if num_experts and not arch.has_experts:
        known = ", ".join(name for name, each in ARCHITECTURES.items() if each.has_experts)
        raise UnsupportedModelError(
            f"{gguf.path}: a mixture of experts of architecture {gguf.metadata['general.architecture']} is not"
            f" supported; those of {known} are"
        )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{gguf.path} lacks tensor token_embd.weight")
    max_position = fields.count("context_length")
    window = fields.count("attention.sliding_window", 0) or None
    config: dict[str, Any] = {
        "architectures": [arch.hf_architecture],
        "model_type": arch.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number(arch.epsilon),
        "max_position_embeddings": max_position,
        "rope_parameters": _rope(fields, rope_factors, max_position),
        "partial_rotary_factor": fields.count("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_output.bias" in gguf.tensors,
        "num_local_experts": num_experts,
        "num_experts_per_tok": fields.count("expert_used_count", None if num_experts else 0),
        "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors,
    }
    config.update(special_token_ids(gguf.metadata))
    return config | arch.extra(fields, config)


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list) and `pad_token_id`, as far as the file gives them."""
    found: dict[str, Any] = {}
    if isinstance(bos := metadata.get("tokenizer.ggml.bos_token_id"), int):
        found["bos_token_id"] = bos
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if any(isinstance(end, int) for end in ends):
        found["eos_token_id"] = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if isinstance(pad := metadata.get("tokenizer.ggml.padding_token_id"), int):
        found["pad_token_id"] = pad
    return found


def _rope(fields: GgufFields, rope_factors: Mapping[str, list[float]], max_position: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10000.0)}
    kind = fields.text("rope.scaling.type", "linear")  # llama.cpp's default; older files have a factor alone
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    original = fields.count("rope.scaling.original_context_length", max_position)
    if ROPE_FREQS in rope_factors:
        # Frequencies come ready made (Llama 3.1 and later); llama.cpp divides by them whatever the scaling type.
        return {**rope, "rope_type": "frequency_factors", "factors": rope_factors[ROPE_FREQS]}
    if ROPE_LONG in rope_factors and ROPE_SHORT in rope_factors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": rope_factors[ROPE_LONG],
            "short_factor": rope_factors[ROPE_SHORT],
            "original_max_position_embeddings": original,
        }
        if (attention := fields.number("rope.scaling.attn_factor", 0.0)) > 0:
            rope["attention_factor"] = attention
        return rope
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rope
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        rope["beta_fast"] = fields.number("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = fields.number("rope.scaling.yarn_beta_slow", 1.0)
        scale = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
        # llama.cpp multiplies its attention factor with YaRN's own.
        rope["attention_factor"] = scale * (1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0)
    return rope
