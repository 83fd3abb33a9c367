"""Paged attention for XLA's CPU backend: live pages only, a block of pages at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import token_rows

_BLOCK_TOKENS = 128


def paged_attention_cpu(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.api.paged_attention`."""
    num_tokens, heads, dim = q.shape
    kv_heads, page_size = pool.shape[3], pool.shape[4]
    group = heads // kv_heads
    rows, positions = token_rows(num_tokens, context_lens, query_starts)
    width = page_table.shape[1]
    block = max(1, min(width, _BLOCK_TOKENS // page_size))
    table = jnp.pad(page_table, ((0, 0), (0, -width % block)))[rows]
    queries = (q.astype(jnp.float32) * scale).reshape(num_tokens, kv_heads, group, dim)

    def body(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        ids = jax.lax.dynamic_slice_in_dim(table, step * block, block, axis=1)
        own = pool[layer, ids]  # [T, block, 2, K, S, D]
        slots = step * block * page_size + jnp.arange(block * page_size)
        seen = slots <= positions[:, None]
        if sliding_window is not None:
            seen &= slots > positions[:, None] - sliding_window
        keys = own[:, :, 0].transpose(0, 2, 1, 3, 4).reshape(num_tokens, kv_heads, -1, dim).astype(jnp.float32)
        values = own[:, :, 1].transpose(0, 2, 1, 3, 4).reshape(num_tokens, kv_heads, -1, dim).astype(jnp.float32)
        values = jnp.where(seen[:, None, :, None], values, 0.0)
        scores = jnp.einsum("tkgd,tksd->tkgs", queries, keys, precision="highest")
        if logit_softcap is not None:
            scores = logit_softcap * jnp.tanh(scores / logit_softcap)
        scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        base = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        exps = jnp.exp(scores - base[..., None])
        keep = jnp.exp(top - base)
        total = total * keep + exps.sum(axis=-1)
        out = out * keep[..., None] + jnp.einsum("tkgs,tksd->tkgd", exps, values, precision="highest")
        return new_top, total, out

    shape = (num_tokens, kv_heads, group)
    if sinks is None:
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, group), shape)
        start = (sink, jnp.ones(shape), jnp.zeros((*shape, dim)))
    blocks = (jnp.max(positions) + block * page_size) // (block * page_size)
    _, total, out = jax.lax.fori_loop(0, blocks, body, start)
    live = (positions >= 0)[:, None, None, None]
    out = jnp.where(live, out / jnp.where(total > 0, total, 1.0)[..., None], 0.0)
    return out.reshape(num_tokens, heads, dim).astype(q.dtype)
