"""SmolLM3: Llama's shape; every fourth layer does not turn its queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import NO_ROPE, ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag, require, windows_of
from jaxserve.models.rope import rope_config_from_hf

ARCHITECTURE = "SmolLM3ForCausalLM"
MODEL_TYPE = "smollm3"

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Layers without rope have the window, where there is one."""
    turns = _turning_layers(hf)
    bias = flag(hf, "attention_bias")
    window = hf.get("sliding_window")
    has_window = flag(hf, "use_sliding_window")
    return decoder_config(
        {"max_position_embeddings": 32768, "num_key_value_heads": 4, **hf},
        ARCHITECTURE,
        rope=rope_config_from_hf(hf, default_theta=_DEFAULT_THETA),
        other_ropes=(NO_ROPE,),
        layer_ropes=tuple(int(not each) for each in turns),
        sliding_windows=windows_of(
            hf, None if window is None else int(window), lambda layer: has_window and not turns[layer]
        ),
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
    )


def _turning_layers(hf: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has rope: `no_rope_layers`, which says 1 where it has, or all but every `interval`-th."""
    count = int(require(hf, "num_hidden_layers"))
    given = hf.get("no_rope_layers")
    if given is None:
        interval = int(hf.get("no_rope_layer_interval") or _DEFAULT_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(given) < count:
        raise UnsupportedModelError(f"no_rope_layers has {len(given)} entries; num_hidden_layers is {count}")
    return [bool(each) for each in given[:count]]
