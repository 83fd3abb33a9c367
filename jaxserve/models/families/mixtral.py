"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, experts_config, require, windows_of
from jaxserve.models.names import LLAMA_NAMES
from jaxserve.models.rope import rope_config_from_hf

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"

NAMES = LLAMA_NAMES.with_modules(
    {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
    }
)
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_KV_HEADS = 8


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """A token's experts weigh by the softmax over all, divided by the sum of the chosen."""
    window = hf.get("sliding_window")
    hf = {"rms_norm_eps": 1e-5, **hf}
    return decoder_config(
        hf,
        ARCHITECTURE,
        num_kv_heads=int(hf.get("num_key_value_heads") or _DEFAULT_KV_HEADS),
        rope=rope_config_from_hf(hf, default_theta=_DEFAULT_THETA),
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: True),
        mlp_kinds=("experts",) * int(require(hf, "num_hidden_layers")),
        experts=experts_config(
            int(require(hf, "num_local_experts")),
            int(hf.get("num_experts_per_tok") or 2),
            int(require(hf, "intermediate_size")),
        ),
        names=NAMES,
    )
