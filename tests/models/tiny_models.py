"""The tiny golden models, and dense attention to run them without pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.models import make_params, model_config_from_hf

FOLDER = Path(__file__).parent.parent / "golden" / "tiny_models"
NAMES = (
    "llama_gqa_tied",
    "llama_head_dim",
    "llama3_rope",
    "llama_yarn",
    "mistral_sliding",
    "qwen2_bias",
    "qwen3_qknorm",
    "gemma2_softcap",
    "gemma3_dual_rope",
    "phi3_fused",
    "olmo2_postnorm",
    "granite_multipliers",
    "mixtral_moe",
    "qwen3_moe",
    "gpt_oss_sinks",
    "deepseek_v3_mla",
    "starcoder2_layernorm",
    "glm4_interleaved",
    "smollm3_nope",
)
"""Every model that is served; a folder of `FOLDER` each."""


def load(name):
    """(config, params, golden) of a tiny model."""
    folder = FOLDER / name
    config = model_config_from_hf(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")

    def read(name, part):
        return tensors[name][part]

    def leaf(weight):
        for tensor in weight.tensors:
            full = tensors[tensor].shape
            reach = weight.tensor_shape
            assert len(full) == len(reach) and all(most >= own for most, own in zip(full, reach, strict=True)), weight
        value = jnp.asarray(weight.read(read, np.float32))
        assert value.shape == weight.shape, weight
        return value

    return config, make_params(config, leaf), json.loads((folder / "golden.json").read_text())


def changed(target, name, *, tensors=None, **fields):
    """A copy of a tiny model at `target`: `tensors(by name)` instead of its own, `fields` of config.json changed."""
    shutil.copytree(FOLDER / name, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors(load_file(target / "model.safetensors")), target / "model.safetensors")
    return target


def dense_attend(layer, q, k, v, cache, options):
    """Attention among the tokens of one sequence, no cache."""
    tokens, heads, _ = q.shape
    v = k[..., : options.value_dim] if v is None else v
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * options.scale
    if options.logit_softcap is not None:
        scores = options.logit_softcap * jnp.tanh(scores / options.logit_softcap)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    scores = jnp.where(seen, scores, -jnp.inf)
    if options.sinks is not None:  # a column of its own for each head, without a value
        sinks = jnp.broadcast_to(options.sinks[:, None, None], (heads, tokens, 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., :tokens]
    return jnp.einsum("hqk,khd->qhd", probs, v, precision="highest"), cache
