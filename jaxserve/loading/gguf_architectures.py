"""GGUF architectures: what each is in Hugging Face's terms, after llama.cpp's converter and graph builders.

An entry says how tensors are named and stored, and which fields of a config.json the family has beside those that all
share. What llama.cpp has in its code and not in the file (which layers have a window, how scores are scaled) is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.gguf_fields import GgufFields

ExtraFields = Callable[[GgufFields, Mapping[str, Any]], dict[str, Any]]
"""Further fields of the config, from the metadata and the fields that all families share."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_LAYERS = 6
"""Layers of Gemma 3 of which the last sees all."""
_SOFTMAX, _SIGMOID = 1, 2
"""Values of `expert_gating_func`; llama.cpp takes softmax where a `deepseek2` file has none."""
_EXPERTS_OF_V3 = 256
"""Files of an older converter do not say that they lie in 8 groups, of which 4 are chosen."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What an architecture name in a GGUF file means.

    Attributes:
      hf_architecture, model_type: as in config.json.
      permuted: query and key rows are interleaved for llama.cpp's pairwise rope.
      norms_hold_one: norm weights are stored as 1 + w.
      names: Hugging Face modules of a layer by GGUF's names, where they are not Llama's; with `{}` for the expert
        where GGUF has one tensor of all and Hugging Face one of each.
      extra: see `ExtraFields`.
      epsilon: the metadata that has what norms add.
      has_experts: mixtures of experts are known.
      has_latents: attention is over latents, so that keys and values differ in size.
    """

    hf_architecture: str
    model_type: str
    permuted: bool = False
    norms_hold_one: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    extra: ExtraFields = lambda fields, config: {}
    epsilon: str = "attention.layer_norm_rms_epsilon"
    has_experts: bool = False
    has_latents: bool = False

    def module(self, gguf_name: str) -> str | None:
        """The Hugging Face module of a layer's tensor; None: it has none."""
        return self.names.get(gguf_name) or _LAYER_NAMES.get(gguf_name)

    def gguf_module(self, hf_module: str) -> str | None:
        """The way back."""
        own = next((name for name, module in self.names.items() if module == hf_module), None)
        others = (name for name, module in _LAYER_NAMES.items() if module == hf_module and name not in self.names)
        return own or next(others, None)


def _llama(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    if config["num_local_experts"]:
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if config["sliding_window"] is None:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def _gemma2(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(config, layers_of_27b=46),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "sliding_window": config["sliding_window"] or 4096,
        "layer_types": _layer_types(fields, config, 2),
    }


def _gemma3(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    own = {**config["rope_parameters"], "rope_theta": fields.number("rope.freq_base", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    period = _GEMMA_LAYERS if config["sliding_window"] else 1
    return {
        **_gemma(config, layers_of_27b=62),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": own, "sliding_attention": local},
        "layer_types": _layer_types(fields, config, period),
    }


def _gemma(config: Mapping[str, Any], layers_of_27b: int) -> dict[str, Any]:
    # The file does not tell the scale of the scores; llama.cpp knows the largest model by its layers.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    largest = config["num_hidden_layers"] == layers_of_27b
    return {"query_pre_attn_scalar": per_head if largest else config["head_dim"]}


def _layer_types(fields: GgufFields, config: Mapping[str, Any], period: int) -> list[str]:
    """Which layers have the window: the file's pattern, or all but the last of every `period`."""
    count = config["num_hidden_layers"]
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != count:
            raise CheckpointError(
                f"{fields.gguf.path}: attention.sliding_window_pattern has {len(pattern)} entries for {count} layers"
            )
        slides = [bool(each) for each in pattern]
    else:
        period = pattern or period
        slides = [(layer + 1) % period != 0 for layer in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _granite(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    # The converter leaves out what is 0; llama.cpp then scales scores by 1 / sqrt(head_dim).
    return {
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _olmo2(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    # A window is OLMo 3's, which has this name too.
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} if config["sliding_window"] else {}


def _qwen3moe(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = fields.count("expert_feed_forward_length", config["intermediate_size"])
    return {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _gpt_oss(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp rounds the ends of YaRN's ramp; the model does not. How gates are clamped is in code on both sides.
    return {
        "intermediate_size": fields.count("expert_feed_forward_length", config["intermediate_size"]),
        "layer_types": _layer_types(fields, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "expert_tensors": "separate",
    }


def _glm4(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    if any(fields.raw("rope.dimension_sections") or ()):
        raise UnsupportedModelError(f"{fields.gguf.path}: positions of several dimensions (mrope) are not supported")
    return {"attention_bias": "blk.0.attn_q.bias" in fields.gguf.tensors}


def _starcoder2(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    # Neither the converter nor llama.cpp knows of the window, which every published model has.
    return {
        "norm_epsilon": config["rms_norm_eps"],
        "use_bias": config["attention_bias"],
        "sliding_window": config["sliding_window"] or 4096,
    }


def _deepseek2(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3's; the other models that have this name are refused.

    Older files have `attn_kv_b`, as Hugging Face's checkpoints; newer ones `attn_k_b` and `attn_v_b`, and in
    `key_length` and `value_length` what is cached, sizes of heads in `key_length_mla` and `value_length_mla`.
    """
    path, turning = fields.gguf.path, fields.count("rope.dimension_count")
    if fields.count("expert_gating_func", _SOFTMAX) != _SIGMOID:
        raise UnsupportedModelError(
            f"{path}: experts that are not chosen by sigmoid scores (expert_gating_func {_SIGMOID}) are not supported:"
            " DeepSeek-V3 and R1 are, DeepSeek-V2 is not"
        )
    for key in ("attention.temperature_scale", "nextn_predict_layers"):
        if fields.number(key, 0.0):
            raise UnsupportedModelError(f"{path}: {key} is {fields.number(key):g}, which is not supported")
    fused, separate = (f"blk.0.{name}.weight" in fields.gguf.tensors for name in ("attn_kv_b", "attn_k_b"))
    if fused and separate:
        raise UnsupportedModelError(f"{path}: attn_kv_b and attn_k_b in one file are not supported; one of them is")
    experts = fields.count("expert_count")
    groups, chosen = (8, 4) if experts == _EXPERTS_OF_V3 else (1, 1)
    if fields.raw("expert_group_count") is not None:
        groups = fields.count("expert_group_count")
        chosen = fields.count("expert_group_used_count")
    return {
        "num_local_experts": 0,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": turning,
        "partial_rotary_factor": 1.0,
        "rope_parameters": _latent_rope(fields, config["rope_parameters"]),
        "rope_interleave": True,
        "attention_bias": False,
        "q_lora_rank": None if fields.raw("attention.q_lora_rank") is None else fields.count("attention.q_lora_rank"),
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": fields.count("attention.key_length_mla", fields.count("attention.key_length")) - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": fields.count("attention.value_length_mla", fields.count("attention.value_length")),
        "first_k_dense_replace": fields.count("leading_dense_block_count"),
        "n_routed_experts": experts,
        "n_shared_experts": fields.count("expert_shared_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "scoring_func": "sigmoid",
        "n_group": groups,
        "topk_group": chosen,
        "latent_tensors": "separate" if separate else "fused",
    }


def _latent_rope(fields: GgufFields, rope: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp turns by cos and sin as they are and scales scores by YaRN's `mscale_all_dim`, as DeepSeek does."""
    kind, path = rope["rope_type"], fields.gguf.path
    if kind == "default":
        return dict(rope)
    if kind != "yarn":
        raise UnsupportedModelError(f"{path}: rope type {kind!r} is not supported over latents; default and yarn are")
    # As a float32: a tenth of what the model's config has, which is a number of a few digits.
    mscale = float(f"{10 * fields.number('rope.scaling.yarn_log_multiplier', 0.0):.7g}")
    factors = [fields.number(f"rope.scaling.{name}", 1.0) for name in ("attn_factor", "yarn_attn_factor")]
    if not mscale or factors != [1.0, 1.0]:
        raise UnsupportedModelError(
            f"{path}: yarn over latents with rope.scaling.yarn_log_multiplier {mscale / 10:g} and attention factors"
            f" {factors} is not supported: a multiplier is needed, and factors of 1"
        )
    kept = {key: value for key, value in rope.items() if key != "attention_factor"}
    return {**kept, "mscale": mscale, "mscale_all_dim": mscale}


_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GPT_OSS_NAMES = {
    **_EXPERT_NAMES,
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_DEEPSEEK_NAMES = {
    **_EXPERT_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

ARCHITECTURES = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", "llama", permuted=True, names=_MIXTRAL_NAMES, extra=_llama, has_experts=True
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        norms_hold_one=True,
        names={**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        extra=_gemma2,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms_hold_one=True,
        names={**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        extra=_gemma3,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", "phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", names=_POST_NORMS, extra=_olmo2),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", permuted=True, extra=_granite),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", names=_EXPERT_NAMES, extra=_qwen3moe, has_experts=True
    ),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", names=_GPT_OSS_NAMES, extra=_gpt_oss, has_experts=True),
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        names=_DEEPSEEK_NAMES,
        extra=_deepseek2,
        has_experts=True,
        has_latents=True,
    ),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        "glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        extra=_glm4,
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", permuted=True),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        extra=_starcoder2,
        epsilon="attention.layer_norm_epsilon",
    ),
}
"""By `general.architecture`."""
