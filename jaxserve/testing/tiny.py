"""A tiny random model in Hugging Face layout: small enough to load in a test, real enough to serve.

The vocabulary is the 256 bytes (id = byte) followed by special tokens, so a test can write prompts and read
outputs by hand. Weights are random but scaled so that greedy text is varied: layers outweigh the embedding in
the residual stream (or a tied model would repeat its last token), and printable bytes have larger embeddings
(or most output would not be text).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID, PAD_ID = range(NUM_BYTES, NUM_BYTES + len(SPECIAL_TOKENS))
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EMBED_SCALE, _RARE_SCALE, _GAIN = 0.25, 0.3, 2.0


def write_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vocab: int = 264,
    max_position: int = 256,
    dtype: str = "float32",
    chat_template: str | None = CHATML,
    add_bos: bool = False,
    **overrides: Any,
) -> Path:
    """Writes config, tokenizer and weights.

    Args:
      path: directory; made if missing.
      seed: of the weights.
      tied: the output layer is the embedding.
      vocab: ids, at least 261; those beyond the bytes and named specials are reserved special tokens.
      max_position: context length.
      dtype: "float32" or "bfloat16" for the stored weights.
      chat_template: Jinja source; None writes none.
      add_bos: encoding puts <|bos|> in front.
      **overrides: entries of config.json, e.g. `num_hidden_layers=4`.

    Returns:
      `path` as a Path.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(tied=tied, vocab=vocab, max_position=max_position, dtype=dtype, **overrides)
    _write_json(directory / "config.json", config)
    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID}
    _write_json(directory / "generation_config.json", ends)
    write_tiny_tokenizer(directory, vocab=vocab, chat_template=chat_template, add_bos=add_bos)
    save_file(tiny_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tiny_config(
    *, tied: bool = True, vocab: int = 264, max_position: int = 256, dtype: str = "float32", **overrides: Any
) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "torch_dtype": dtype,
        **overrides,
    }


def write_tiny_tokenizer(
    directory: Path, *, vocab: int = 264, chat_template: str | None = CHATML, add_bos: bool = False
) -> None:
    """tokenizer.json and tokenizer_config.json of the byte vocabulary."""
    specials = special_tokens(vocab)
    added = [
        {
            "id": NUM_BYTES + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(specials)
    ]
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    with_bos = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, bos, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS_ID], "tokens": ["<|bos|>"]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": with_bos if add_bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    settings: dict[str, Any] = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "add_bos_token": add_bos,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(directory / "tokenizer_config.json", settings)


def special_tokens(vocab: int) -> list[str]:
    """Names of the ids from 256 up."""
    reserved = vocab - NUM_BYTES - len(SPECIAL_TOKENS)
    if reserved < 0:
        raise ValueError(f"vocab is {vocab}; it must be at least {NUM_BYTES + len(SPECIAL_TOKENS)}")
    return [*SPECIAL_TOKENS, *(f"<|reserved_{index}|>" for index in range(reserved))]


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear layer of a decoder layer, by its name there."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Weights under their Hugging Face names, linear layers as [out, in]."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    dtype = np.dtype(np.float32) if config["torch_dtype"] == "float32" else np.dtype(ml_dtypes.bfloat16)
    width, vocab = config["hidden_size"], config["vocab_size"]
    shapes = layer_shapes(config)

    def linear(rows: int, columns: int) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = rng.normal(0.0, _GAIN / np.sqrt(columns), (rows, columns))
        return values.astype(dtype)

    def norm() -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = rng.uniform(0.8, 1.2, width)
        return values.astype(dtype)

    scale = np.full((vocab, 1), _RARE_SCALE)
    scale[32:127] = 1.0
    embed = rng.normal(0.0, 1.0, (vocab, width)) * scale * _EMBED_SCALE
    tensors = {"model.embed_tokens.weight": embed.astype(dtype), "model.norm.weight": norm()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = linear(*shape)
        tensors[f"{prefix}.input_layernorm.weight"] = norm()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (rng.normal(0.0, 1.0, (vocab, width)) * scale * _EMBED_SCALE).astype(dtype)
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
