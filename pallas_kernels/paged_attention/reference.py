"""The reference: one token at a time, every page of its table row, float32 softmax. Slow and plain."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import split_latent, split_pages
from pallas_kernels.paged_attention.rows import token_rows


def paged_attention_reference(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    *,
    scales: jax.Array | None,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: jax.Array | None,
    value_dim: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.api.paged_attention`; `interpret` means nothing here."""
    rows, positions = token_rows(q.shape[0], context_lens, query_starts)

    def attend_one(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, row, position = inputs
        heads, dim = query.shape
        pages = pool[layer, page_table[row]].astype(jnp.float32)
        own = None if scales is None else scales[layer, page_table[row]][..., None]  # [W, 2, K, S, 1]
        if value_dim is not None:
            pair = None if own is None else jnp.concatenate([own[:, 0], own[:, 1]], axis=-1)
            keys, values = split_latent(pages[:, 0, ..., :dim], value_dim, pair)
        else:
            keys, values = split_pages(pages, dim)  # [W, K, S, D]
            if own is not None:
                keys, values = keys * own[:, 0], values * own[:, 1]
        kv_heads = keys.shape[1]
        keys = keys.transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)  # [K, W * S, D]
        values = values.transpose(1, 0, 2, 3).reshape(kv_heads, -1, values.shape[-1])
        slots = jnp.arange(keys.shape[1])
        seen = slots <= position
        if sliding_window is not None:
            seen &= slots > position - sliding_window
        # What is not seen may be anything, NaN included: 0 * NaN would spoil the sum.
        values = jnp.where(seen[None, :, None], values, 0.0)
        grouped = query.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, dim)
        scores = jnp.einsum("kgd,ksd->kgs", grouped, keys, precision="highest") * scale
        if logit_softcap is not None:
            scores = logit_softcap * jnp.tanh(scores / logit_softcap)
        scores = jnp.where(seen, scores, -jnp.inf).reshape(heads, -1)
        top = jnp.max(scores, axis=-1)
        if sinks is not None:
            top = jnp.maximum(top, sinks.astype(jnp.float32))
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        exps = jnp.exp(scores - top[:, None])
        total = exps.sum(axis=-1)
        if sinks is not None:
            total += jnp.exp(sinks.astype(jnp.float32) - top)
        probs = jnp.where(total[:, None] > 0, exps / total[:, None], 0.0)
        out = jnp.einsum("kgs,ksd->kgd", probs.reshape(kv_heads, -1, slots.size), values, precision="highest")
        return jnp.where(position >= 0, out.reshape(heads, -1), 0.0).astype(q.dtype)

    return jax.lax.map(attend_one, (q, rows, positions))
