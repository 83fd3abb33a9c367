"""Tiny models as llama.cpp's converter would write them, with names from the gguf package's own map."""

import json
import math
import re

import gguf
import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file

from tests.loading.gguf_files import permute

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}
"""By `model_type`."""

_PERMUTED = ("llama", "mistral", "granite", "mixtral", "smollm3")
_NORMS_HOLD_ONE = ("gemma2", "gemma3_text")


def write_family(path, folder, *, quant=None, edit=None, latents="separate"):
    """Writes the model of a Hugging Face folder as one GGUF file.

    Args:
      quant: of matrices; float32 when None.
      edit: called with the writer, to add metadata.
      latents: of DeepSeek: "separate" as newer converters write keys and values, "fused" as older ones.
    """
    config = json.loads((folder / "config.json").read_text())
    kind, arch = config["model_type"], ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config, latents)
    if edit is not None:
        edit(writer)
    heads = {".q_proj.": config["num_attention_heads"], ".k_proj.": config["num_key_value_heads"]}
    tensors = _of_all_experts(load_file(folder / "model.safetensors"))
    if kind == "deepseek_v3":
        tensors = _of_latents(tensors, config, latents)
    for name, value in tensors.items():
        if kind in _PERMUTED:
            value = next((permute(value, count) for part, count in heads.items() if part in name), value)
        if kind in _NORMS_HOLD_ONE and name.endswith("norm.weight"):
            value = value + 1
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        value = np.ascontiguousarray(value)
        if quant is None or value.ndim == 1 or name.endswith((".bias", ".gate.weight", ".router.weight")):
            writer.add_tensor(own, value)
        else:
            writer.add_tensor(own, gguf.quantize(value, quant), raw_dtype=quant)
    for name, values in _rope_tensors(config).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_all_experts(tensors):
    """Experts' matrices one behind the other in one tensor, under the names that the converter gives to the map."""
    found, stacks = {}, {}
    for name, value in tensors.items():
        if match := re.fullmatch(r"model\.(layers\.\d+\.)(.*)\.experts\.(\d+)\.(\w+)\.weight", name):
            layer, block, index, matrix = match.groups()
            middle = "feed_forward" if block == "block_sparse_moe" else f"{block}"
            prefix = "" if block == "block_sparse_moe" else "model."
            stacks.setdefault(f"{prefix}{layer}{middle}.experts.{matrix}.weight", {})[int(index)] = value
        elif ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            base, _, matrix = name.rpartition(".")
            kind = "bias" if matrix.endswith("_bias") else "weight"
            value = value if kind == "bias" else value.swapaxes(1, 2)
            if matrix.startswith("down"):
                found[f"{base}.down_proj.{kind}"] = value
            else:
                found[f"{base}.gate_proj.{kind}"], found[f"{base}.up_proj.{kind}"] = value[:, 0::2], value[:, 1::2]
        else:
            found[f"{name}.weight" if name.endswith(".sinks") else name] = value
    return found | {name: np.stack([own[i] for i in range(len(own))]) for name, own in stacks.items()}


def _of_latents(tensors, config, latents):
    """Keys and values apart, or not; without layers for multi-token prediction."""
    found, heads, nope = {}, config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, value in tensors.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= config["num_hidden_layers"]:
            continue
        if latents == "separate" and name.endswith("kv_b_proj.weight"):
            both = value.reshape(heads, nope + config["v_head_dim"], -1)
            found[name.replace("kv_b_proj", "k_b_proj")] = both[:, :nope].transpose(0, 2, 1)
            found[name.replace("kv_b_proj", "v_b_proj")] = both[:, nope:]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    return found


def _write_latents(writer, config, latents):
    nope, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(turning)
    if latents == "separate":
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + turning)
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(nope + turning)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(nope + turning)
        writer.add_value_length(config["v_head_dim"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    rope = {**(config.get("rope_scaling") or {}), **config.get("rope_parameters", {})}
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_metadata(writer, config, latents):
    kind, rope = config["model_type"], config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if kind == "deepseek_v3":
        _write_latents(writer, config, latents)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if kind == "starcoder2":
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if (head_dim := config.get("head_dim")) and kind != "deepseek_v3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind != "gemma2":  # its converter writes no base
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    # The converter writes none for starcoder2, whose window is small here: without it none of it would be tested.
    if kind in ("mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss", "starcoder2"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind in ("phi3", "glm4"):
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * config["hidden_size"]) // config["num_attention_heads"])
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if kind != "mixtral":
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "gemma3_text":
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        growth = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(growth) / math.log(original)))


def _rope_tensors(config):
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": rope["long_factor"],
            "rope_factors_short.weight": rope["short_factor"],
        }
    if rope.get("rope_type") != "llama3":
        return {}
    factors = []
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config["head_dim"])
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}
