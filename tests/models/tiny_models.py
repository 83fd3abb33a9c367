"""The tiny golden models, and dense attention to run them without pages."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

from jaxserve.models import make_params, model_config_from_hf

FOLDER = Path(__file__).parent.parent / "golden" / "tiny_models"
NAMES = ("llama_gqa_tied", "llama_head_dim", "llama3_rope", "llama_yarn", "mistral_sliding")


def load(name):
    """(config, params, golden) of a tiny model."""
    folder = FOLDER / name
    config = model_config_from_hf(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")

    def leaf(weight):
        tensor = tensors[weight.hf_name]
        tensor = jnp.asarray(tensor.T if weight.transpose else tensor)
        assert tensor.shape == weight.shape, weight
        return tensor

    return config, make_params(config, leaf), json.loads((folder / "golden.json").read_text())


def dense_attend(layer, q, k, v, cache, sliding_window):
    """Attention among the tokens of one sequence, no cache."""
    tokens, heads, dim = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * dim**-0.5
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    seen = distance >= 0
    if sliding_window is not None:
        seen &= distance < sliding_window
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", probs, v, precision="highest"), cache
