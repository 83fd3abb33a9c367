"""A model's configuration as GGUF metadata: the way back from `gguf_config`, by the keys of llama.cpp's converter.

What the file cannot say is not checked here: `write_gguf` reads its own file and compares.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np

from jaxserve.core import UnsupportedModelError
from jaxserve.loading.gguf_architectures import ARCHITECTURES
from jaxserve.loading.gguf_config import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from jaxserve.models.config import LatentConfig, ModelConfig, RopeConfig
from jaxserve.models.rope import inverse_frequencies, rotary_dim

_NAMES = {arch.hf_architecture: name for name, arch in ARCHITECTURES.items()} | {
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
}
_WITH_PATTERN = ("gemma2", "gemma3", "gpt-oss")
"""Architectures whose windows differ from layer to layer."""
_END_TOKENS = ("eos", "eot", "eom")

Metadata = dict[str, Any]
"""Values by key: str, bool, int (uint32), float (float32) or lists of them."""


def gguf_architecture_of(config: ModelConfig) -> str:
    """The name of a model's architecture in GGUF.

    Raises:
      UnsupportedModelError: it has none that is written.
    """
    name = _NAMES.get(config.architecture)
    if name is None:
        raise UnsupportedModelError(
            f"{config.architecture} cannot be written as GGUF; those that can are {', '.join(_NAMES)}."
            " Write safetensors or orbax"
        )
    return name


def model_metadata(config: ModelConfig, end_tokens: list[int]) -> Metadata:
    """What a GGUF file says of a model, but for its tokenizer's vocabulary.

    Raises:
      UnsupportedModelError: there is no such architecture in GGUF, or it has no place for something.
    """
    arch = gguf_architecture_of(config)
    rope = _full_rope(config)
    own: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        ARCHITECTURES[arch].epsilon: float(config.rms_norm_eps),
        "rope.dimension_count": rotary_dim(rope, config.rope_head_dim),
        "rope.freq_base": float(rope.theta),
        **_scaling(rope),
        **_windows(config, arch),
    }
    if config.experts is not None:
        own["expert_count"] = config.experts.num_experts
        own["expert_used_count"] = config.experts.num_chosen
        own["expert_feed_forward_length"] = config.experts.inner_size
    if config.attention_softcap is not None:
        own["attn_logit_softcapping"] = float(config.attention_softcap)
    if config.final_logit_softcap is not None:
        own["final_logit_softcapping"] = float(config.final_logit_softcap)
    if arch == "gemma3":
        local = [config.ropes[index] for index, window in _layers(config) if window is not None]
        own["rope.freq_base_swa"] = float((local or [rope])[0].theta)
    if arch == "granite":
        own["attention.scale"] = float(config.attention_scale or config.head_dim**-0.5)
        own["embedding_scale"] = float(config.embedding_multiplier)
        own["residual_scale"] = float(config.residual_multiplier)
        own["logit_scale"] = float(config.logits_divisor)
    if config.latent is not None:
        own |= _latents(config, config.latent)
        own.pop("rope.scaling.yarn_attn_factor", None)  # the log multiplier has it
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in own.items()},
        **_special_ids(config, end_tokens),
    }


def rope_tensors(config: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of frequency factors, by name."""
    rope = _full_rope(config)
    if rope.kind in ("llama3", "frequency_factors"):
        plain = RopeConfig(theta=rope.theta, partial_rotary_factor=rope.partial_rotary_factor)
        length = config.max_position_embeddings
        size = config.rope_head_dim
        factors = inverse_frequencies(plain, size, length) / inverse_frequencies(rope, size, length)
        return {ROPE_FREQS: factors.astype(np.float32)}
    if rope.kind == "longrope":
        both = {ROPE_LONG: rope.long_factors, ROPE_SHORT: rope.short_factors}
        return {name: np.array(factors, np.float32) for name, factors in both.items()}
    return {}


def _layers(config: ModelConfig) -> list[tuple[int, int | None]]:
    """Rope and window of each layer."""
    return list(zip(config.layer_ropes, config.sliding_windows, strict=True))


def _full_rope(config: ModelConfig) -> RopeConfig:
    """That of the layers without a window, which the file describes."""
    return config.ropes[next((index for index, window in _layers(config) if window is None), config.layer_ropes[0])]


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rope.kind in ("linear", "yarn"):
        found = {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope.original_max_position
    if rope.kind == "longrope":
        found["rope.scaling.attn_factor"] = float(rope.attention_factor)
    if rope.kind == "yarn":
        found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
        # llama.cpp multiplies with YaRN's own factor.
        own = 1.0 + 0.1 * math.log(rope.factor) if rope.factor > 1.0 else 1.0
        found["rope.scaling.yarn_attn_factor"] = float(rope.attention_factor) / own
    return found


def _latents(config: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    """Of newer `deepseek2` files: `key_length` and `value_length` are what is cached."""
    experts, rope = config.experts, config.rope
    assert experts is not None, f"{config.architecture} has no experts"
    queries = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    found: dict[str, Any] = {
        "attention.value_length": latent.kv_lora_rank,
        "attention.kv_lora_rank": latent.kv_lora_rank,
        "attention.key_length_mla": queries,
        "attention.value_length_mla": latent.v_head_dim,
        "leading_dense_block_count": config.mlp_kinds.count("dense"),
        "expert_shared_count": experts.shared_size // experts.inner_size,
        "expert_weights_scale": float(experts.scale),
        "expert_weights_norm": experts.normalise,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_group_count": experts.num_groups,
        "expert_group_used_count": experts.num_groups_chosen,
    }
    if latent.q_lora_rank is not None:
        found["attention.q_lora_rank"] = latent.q_lora_rank
    if rope.kind == "yarn" and rope.factor > 1.0:
        # Scores are scaled by the square of 1 + multiplier * log(factor).
        growth = math.sqrt(config.score_scale * math.sqrt(queries)) - 1.0
        found["rope.scaling.yarn_log_multiplier"] = round(growth / math.log(rope.factor), 9)
    return found


def _windows(config: ModelConfig, arch: str) -> dict[str, Any]:
    windows = {window for window in config.sliding_windows if window is not None}
    if not windows:
        # Gemma's and gpt-oss's readers take a window for granted, but for one that says which layers have it.
        return {"attention.sliding_window_pattern": [False] * config.num_layers} if arch in _WITH_PATTERN else {}
    if len(windows) > 1:
        raise UnsupportedModelError(f"windows of {sorted(windows)} tokens cannot be written as GGUF; one size can")
    found: dict[str, Any] = {"attention.sliding_window": windows.pop()}
    if arch in _WITH_PATTERN:
        found["attention.sliding_window_pattern"] = [window is not None for window in config.sliding_windows]
    return found


def _special_ids(config: ModelConfig, ends: list[int]) -> Metadata:
    if len(ends) > len(_END_TOKENS):
        raise UnsupportedModelError(
            f"the model has {len(ends)} tokens that end a text; GGUF has a place for {len(_END_TOKENS)}"
        )
    found = {f"tokenizer.ggml.{name}_token_id": int(end) for name, end in zip(_END_TOKENS, ends, strict=False)}
    if config.bos_token_id is not None:
        found["tokenizer.ggml.bos_token_id"] = int(config.bos_token_id)
    if config.pad_token_id is not None:
        found["tokenizer.ggml.padding_token_id"] = int(config.pad_token_id)
    return found


def add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    """Adds all but the architecture, which the writer was made with."""
    kinds = {
        str: gguf.GGUFValueType.STRING,
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            kind = gguf.GGUFValueType.INT32 if type(value[0]) is int else kinds[type(value[0])]
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kinds[type(value)])
