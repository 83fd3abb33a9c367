"""Writing GGUF files for tests, as llama.cpp's converter does: names, permuted query and key rows, metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(value: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], quant: Quant) -> np.ndarray:
    """Bytes of a quantised tensor that dequantises to finite numbers, for types the gguf package cannot quantise."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
    scales = {Quant.Q4_K: (0, 2), Quant.Q5_K: (0, 2), Quant.Q6_K: (208,), Quant.Q2_K: (80, 82), Quant.Q3_K: (108,)}
    for at in scales[quant]:
        raw[..., at : at + 2] = rng.uniform(1e-4, 1e-3, (*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    quant: Quant = Quant.F32,
    extra: dict[str, np.ndarray] | None = None,
    edit=None,
) -> Path:
    """Writes a model.

    Args:
      path: file to write.
      config: config.json fields.
      tensors: by Hugging Face name.
      arch: GGUF architecture; "llama" permutes query and key rows.
      quant: of matrices; vectors stay float32.
      extra: further tensors by GGUF name, float32.
      edit: called with the writer, to add metadata.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if edit is not None:
        edit(writer)
    rng = np.random.default_rng(7)
    for name, value in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = permute(value, heads if ".q_proj." in name else kv_heads)
        if value.ndim == 1 or quant == Quant.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value, np.float32))
            continue
        try:
            data = gguf.quantize(np.ascontiguousarray(value, np.float32), quant)
        except NotImplementedError:
            data = random_blocks(rng, value.shape, quant)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quant)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
