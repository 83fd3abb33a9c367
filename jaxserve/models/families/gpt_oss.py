"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.families.hf_config import decoder_config, experts_config, flag, require, windows_of
from jaxserve.models.names import LLAMA_NAMES
from jaxserve.models.rope import rope_config_from_hf

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"

SEPARATE_NAMES = LLAMA_NAMES.with_modules({"mlp.router": "mlp.router"})
"""With a tensor for each matrix of each expert, as other families have; GGUF's."""

_FUSED = "mlp.experts.gate_up_proj"
_EXPERT_MODULES = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
NAMES = SEPARATE_NAMES.with_modules(
    dict(zip(_EXPERT_MODULES, (_FUSED, _FUSED, "mlp.experts.down_proj"), strict=True)), in_out=_EXPERT_MODULES
)
_DEFAULT_WINDOW = 128
_DEFAULT_THETA = 150_000.0


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The first layer has the window, the second has not, and so on; `expert_tensors` is `fused` or `separate`."""
    hf = {"rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, **hf}
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {hf['hidden_act']!r} is not supported for {ARCHITECTURE}; silu is")
    window = hf.get("sliding_window", _DEFAULT_WINDOW)
    bias = flag(hf, "attention_bias", True)
    return decoder_config(
        hf,
        ARCHITECTURE,
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        rope=rope_config_from_hf(hf, default_theta=_DEFAULT_THETA),
        sliding_windows=windows_of(hf, None if window is None else int(window), lambda layer: layer % 2 == 0),
        mlp_kinds=("experts",) * int(require(hf, "num_hidden_layers")),
        experts=experts_config(
            int(require(hf, "num_local_experts")),
            int(hf.get("num_experts_per_tok") or hf.get("experts_per_token") or 4),
            int(require(hf, "intermediate_size")),
            scoring="softmax_of_chosen",
            normalise=False,
            router_bias=True,
            bias=True,
            swiglu_limit=float(hf.get("swiglu_limit") or 7.0),
            swiglu_alpha=float(hf.get("swiglu_alpha") or 1.702),
        ),
        names=SEPARATE_NAMES if hf.get("expert_tensors") == "separate" else NAMES,
    )
