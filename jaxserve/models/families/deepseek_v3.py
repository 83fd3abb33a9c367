"""DeepSeek-V3, R1 and what shares their shape (Kimi K2): latent attention, a few dense layers, then experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import LatentConfig, ModelConfig, RopeConfig
from jaxserve.models.families.hf_config import decoder_config, experts_config, flag, require
from jaxserve.models.names import LLAMA_NAMES
from jaxserve.models.rope import rope_config_from_hf, yarn_mscale

ARCHITECTURE = "DeepseekV3ForCausalLM"
MODEL_TYPE = "deepseek_v3"

SEPARATE_NAMES = replace(
    LLAMA_NAMES.with_modules({"attention.k_up": "self_attn.k_b_proj", "attention.v_up": "self_attn.v_b_proj"}),
    in_out=(),
)
"""With a tensor [heads, out, in] for each of the two products that `kv_b_proj` is made for; GGUF's."""


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Layers for multi-token prediction (`num_nextn_predict_layers`) may be in a checkpoint and are not used.

    `latent_tensors` is `fused` or `separate`: how keys and values are made of latents, see `SEPARATE_NAMES`.
    """
    _check_routing(hf)
    bias = flag(hf, "attention_bias")
    count, first_dense = int(require(hf, "num_hidden_layers")), int(hf.get("first_k_dense_replace") or 0)
    rope = rope_config_from_hf(hf)
    latent = _latent(hf)
    return decoder_config(
        hf,
        ARCHITECTURE,
        rope=rope,
        rope_interleaved=flag(hf, "rope_interleave", True),
        num_kv_heads=1,
        head_dim=latent.row_dim,
        latent=latent,
        attention_scale=_scale(hf, latent, rope),
        qkv_bias=bias,
        o_bias=bias,
        names=SEPARATE_NAMES if hf.get("latent_tensors") == "separate" else LLAMA_NAMES,
        unused_layers=int(hf.get("num_nextn_predict_layers") or 0),
        mlp_kinds=tuple("dense" if index < first_dense else "experts" for index in range(count)),
        experts=experts_config(
            int(require(hf, "n_routed_experts")),
            int(require(hf, "num_experts_per_tok")),
            int(require(hf, "moe_intermediate_size")),
            scoring="sigmoid",
            normalise=flag(hf, "norm_topk_prob", True),
            scale=float(hf.get("routed_scaling_factor") or 1.0),
            num_groups=int(hf.get("n_group") or 1),
            num_groups_chosen=int(hf.get("topk_group") or 1),
            correction=True,
            shared_size=int(hf.get("n_shared_experts") or 0) * int(require(hf, "moe_intermediate_size")),
        ),
    )


def _check_routing(hf: Mapping[str, Any]) -> None:
    """Refuses the choices that the original configs name beside the ones this family has."""
    for name, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if hf.get(name, wanted) != wanted:
            raise UnsupportedModelError(f"{name} is {hf[name]!r}, which is not supported; {wanted!r} is")


def _latent(hf: Mapping[str, Any]) -> LatentConfig:
    try:
        return LatentConfig(
            q_lora_rank=None if hf.get("q_lora_rank") is None else int(hf["q_lora_rank"]),
            kv_lora_rank=int(require(hf, "kv_lora_rank")),
            qk_nope_head_dim=int(require(hf, "qk_nope_head_dim")),
            qk_rope_head_dim=int(require(hf, "qk_rope_head_dim")),
            v_head_dim=int(require(hf, "v_head_dim")),
        )
    except ValueError as error:
        raise UnsupportedModelError(f"the model's config is not usable: {error}") from error


def _scale(hf: Mapping[str, Any], latent: LatentConfig, rope: RopeConfig) -> float:
    """Yarn's `mscale_all_dim` is taken from cos and sin (`RopeConfig.attention_factor`) and put here, squared."""
    scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    values = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    all_dim = values.get("mscale_all_dim")
    if rope.kind == "default" or not all_dim:
        return float(scale)
    return float(scale) * yarn_mscale(rope.factor, float(all_dim)) ** 2
