"""StarCoder 2: layer norms, MLPs without a gate, biases everywhere, a window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, flag, require, windows_of
from jaxserve.models.names import LLAMA_NAMES

ARCHITECTURE = "Starcoder2ForCausalLM"
MODEL_TYPE = "starcoder2"

NAMES = LLAMA_NAMES.with_modules({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The embedding is the output layer too, unless the config says no."""
    for name, wanted in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if hf.get(name, wanted) != wanted:
            raise UnsupportedModelError(f"{name} is {hf[name]!r}, which is not supported; {wanted!r} is")
    bias = flag(hf, "use_bias", True)
    window = hf.get("sliding_window")
    return decoder_config(
        {"max_position_embeddings": 4096, "num_key_value_heads": 2, **hf},
        ARCHITECTURE,
        default_activation="gelu_pytorch_tanh",
        rms_norm_eps=float(hf.get("norm_epsilon", 1e-5)),
        norm_kind="layer",
        mlp_kinds=("plain",) * int(require(hf, "num_hidden_layers")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: True),
        names=NAMES,
    )
