"""Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, experts_config, flag, require, windows_of

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"

_DEFAULT_WINDOW = 4096


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Dense are the layers of `mlp_only_layers` and all but every `decoder_sparse_step`-th; each has the window."""
    count = int(require(hf, "num_hidden_layers"))
    window = int(hf.get("sliding_window") or _DEFAULT_WINDOW) if flag(hf, "use_sliding_window") else None
    bias = flag(hf, "attention_bias")
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step") or 1)
    if not isinstance(dense, list | tuple) or step < 1:
        raise UnsupportedModelError(
            f"mlp_only_layers is {dense!r} and decoder_sparse_step {step}; a list of layers and a positive number are"
            " supported"
        )
    name = "num_local_experts" if hf.get("num_local_experts") else "num_experts"
    return decoder_config(
        hf,
        ARCHITECTURE,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=windows_of(hf, window, lambda layer: True),
        mlp_kinds=tuple("dense" if i in dense or (i + 1) % step else "experts" for i in range(count)),
        experts=experts_config(
            int(require(hf, name)),
            int(require(hf, "num_experts_per_tok")),
            int(require(hf, "moe_intermediate_size")),
            normalise=flag(hf, "norm_topk_prob"),
        ),
    )
