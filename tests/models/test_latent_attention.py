"""Latent attention in absorbed form against keys and values made of the latents, head by head, in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import LatentConfig, ModelConfig, RopeConfig, init_params
from jaxserve.models.decoder_layer import bind_layer
from jaxserve.models.rope import rope_tables
from tests.models.tiny_models import dense_attend

LATENT = LatentConfig(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
CONFIG = ModelConfig(
    architecture="test",
    vocab_size=32,
    hidden_size=20,
    intermediate_size=24,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=LATENT.row_dim,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=64,
    latent=LATENT,
    attention_scale=0.3,
    rope_interleaved=True,
)
TOKENS = 7


def expanded(config, weights, x):
    """What the layer's attention gives, as the paper writes it."""
    latent, w = config.latent, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)

    def linear(name, x):
        return x @ w[name]["kernel"] + w[name].get("bias", 0.0)

    def norm(name, x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + latent.norm_eps) * w[name]["scale"]

    def turned(x):
        half = x.shape[-1] // 2
        angles = np.arange(TOKENS)[:, None] * 1e4 ** -(np.arange(half) / half)
        first, second = (x[..., 0::2], x[..., 1::2]) if config.rope_interleaved else (x[..., :half], x[..., half:])
        pairs = (first + 1j * second) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    q = (
        linear("q_proj", x)
        if latent.q_lora_rank is None
        else linear("q_b_proj", norm("q_a_norm", linear("q_a_proj", x)))
    )
    row = linear("kv_a_proj", x)
    c, k_pe = norm("kv_a_norm", row[:, : latent.kv_lora_rank]), turned(row[:, latent.kv_lora_rank :])
    outputs = []
    for head, own in enumerate(np.split(q, config.num_heads, axis=-1)):
        query = np.concatenate([own[:, : latent.qk_nope_head_dim], turned(own[:, latent.qk_nope_head_dim :])], -1)
        key = np.concatenate([c @ w["k_up"]["kernel"][head].T, k_pe], axis=-1)
        scores = np.where(np.tri(TOKENS), query @ key.T * config.attention_scale, -np.inf)
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(odds / odds.sum(axis=-1, keepdims=True) @ (c @ w["v_up"]["kernel"][head]))
    return linear("o_proj", np.concatenate(outputs, axis=-1))


@pytest.mark.parametrize(
    ("change", "interleaved"),
    [({}, True), ({"q_lora_rank": None}, True), ({}, False)],
    ids=["whole", "queries_at_once", "in_halves"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_absorbed_attention_is_the_expanded_one(change, interleaved, bias):
    latent = replace(LATENT, **change)
    config = replace(CONFIG, latent=latent, rope_interleaved=interleaved, qkv_bias=bias, o_bias=bias)
    params = init_params(config, jax.random.key(0))["layers"][0]
    noise = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params)
    x = jax.random.normal(jax.random.key(2), (TOKENS, config.hidden_size))
    rope = rope_tables(config.rope, config.rope_head_dim, 64, jnp.arange(TOKENS))
    layer = bind_layer(config, config.layer_kinds[0], params)
    with jax.default_matmul_precision("highest"):
        found, _ = layer.attention(x, rope, 0, dense_attend, None, None)
    np.testing.assert_allclose(found, expanded(config, params["attention"], np.asarray(x)), atol=2e-5)


def test_only_latent_and_shared_key_part_are_kept():
    seen = []

    def attend(layer, q, k, v, cache, options):
        seen.append((q.shape, k.shape, v, options.value_dim))
        return q[..., : options.value_dim], cache

    layer = bind_layer(CONFIG, CONFIG.layer_kinds[0], init_params(CONFIG, jax.random.key(0))["layers"][0])
    rope = rope_tables(CONFIG.rope, CONFIG.rope_head_dim, 64, jnp.arange(TOKENS))
    layer.attention(jnp.ones((TOKENS, 20)), rope, 0, attend, None, None)
    assert seen == [((TOKENS, 3, 14), (TOKENS, 1, 14), None, 10)]


def test_a_config_that_does_not_fit_its_latents_is_refused():
    with pytest.raises(ValueError, match="num_kv_heads is 3 and head_dim 14; latent attention has one KV head of 14"):
        replace(CONFIG, num_kv_heads=3)
    with pytest.raises(ValueError, match="qk_rope_head_dim is 3; rotary embedding needs an even number"):
        replace(CONFIG, latent=replace(LATENT, qk_rope_head_dim=3), head_dim=13)
    with pytest.raises(ValueError, match="v_head_dim is 0; latent attention needs a positive integer"):
        replace(LATENT, v_head_dim=0)
