"""Writes a Llama model as a Hugging Face folder in float32, for peers that read no GGUF.

Usage: python tools/peers/write_hf_model.py MODEL FOLDER    with the project's Python
MODEL is what the server's --model takes, as smollm2-135m.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.loading import load_model, resolve_model
from jaxserve.models import ModelConfig, weights
from jaxserve.runtime import make_mesh


def main(model: str, folder: str) -> None:
    """Writes config.json, model.safetensors and the tokenizer."""
    loaded = load_model(resolve_model(model), "float32", mesh=make_mesh(1))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(loaded.config), indent=1) + "\n")
    tensors = {}
    for weight in weights(loaded.config):
        leaf: Any = loaded.params
        for key in weight.path:
            leaf = leaf[key]
        array = np.asarray(leaf)
        tensors[weight.hf_name] = np.ascontiguousarray(array.T if weight.transpose else array)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    writer = Path(__file__).resolve().parents[1] / "clients" / "write_tokenizer.py"
    subprocess.run([sys.executable, str(writer), model, folder], check=True)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a Llama.

    Raises:
      ValueError: the model is another one, or its rope is not the plain one.
    """
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise ValueError(f"{config.architecture} with rope {config.rope.kind}: only a plain Llama is written")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])
