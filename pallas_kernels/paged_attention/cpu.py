"""Paged attention for XLA's CPU backend.

Both forms stream K and V block by block through a softmax that is renormalised as it goes (Milakov and
Gimelshein 2018), so nothing is as large as the page table is wide, and the loops end where the longest
live context ends: a table that is far wider than its rows costs nothing. Blocks are gathered as whole
pages, the unit that is contiguous, and then multiplied by batched matrix products.

What a query does not see is replaced, not multiplied by zero: unused slots may hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import split_latent

DECODE_BLOCK_TOKENS = 128
PREFILL_BLOCK_TOKENS = 128
PREFILL_BLOCK_QUERIES = 64


class _Softmax(NamedTuple):
    """A softmax-weighted sum in the making: running maximum, sum of exponentials, weighted values."""

    top: jax.Array
    total: jax.Array
    out: jax.Array

    @classmethod
    def start(cls, sinks: jax.Array | None, shape: tuple[int, ...], dim: int) -> _Softmax:
        """Before any key; `sinks` (broadcast to `shape`) is a key without a value."""
        out = jnp.zeros((*shape, dim), jnp.float32)
        if sinks is None:
            return cls(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), out)
        return cls(jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32), out)

    def add(self, scores: jax.Array, values: jax.Array) -> _Softmax:
        """Takes in scores [..., N, S] (-inf: not seen) and values [..., S, D]."""
        top = jnp.maximum(self.top, scores.max(axis=-1))
        base = jnp.where(jnp.isfinite(top), top, 0.0)
        exps = jnp.exp(scores - base[..., None])
        keep = jnp.exp(self.top - base)
        out = jnp.matmul(exps, values, precision=jax.lax.Precision.HIGHEST)
        return _Softmax(top, self.total * keep + exps.sum(axis=-1), self.out * keep[..., None] + out)

    def result(self) -> jax.Array:
        """The weighted mean; zeros where nothing was seen."""
        return self.out / jnp.where(self.total > 0, self.total, 1.0)[..., None]


class _PageReader(NamedTuple):
    """Whole pages of one layer, as float32."""

    pool: jax.Array
    scales: jax.Array | None
    layer: jax.Array
    dim: int
    value_dim: int | None

    def read(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V of pages `ids` int32[R, N], each float32[R, K, N * S, D]; V [..., value_dim] of a latent pool."""
        num_layers, num_pages, parts, kv_heads, page_size, _ = self.pool.shape
        shape = (ids.shape[0], kv_heads, ids.shape[1] * page_size, -1)
        heads = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
        pages = (self.layer * num_pages + ids)[:, None, :]

        def take(array: jax.Array, part: int) -> jax.Array:
            """One part of the pages of an array [L, P, parts, K, S, ...], whose dimensions P to K are joined first."""
            flat = array.reshape(num_layers * num_pages * array.shape[2] * kv_heads, *array.shape[4:])
            rows = pages * (array.shape[2] * kv_heads) + part * kv_heads + heads
            return flat.at[rows].get(mode="promise_in_bounds").reshape(shape).astype(jnp.float32)

        if self.value_dim is not None:
            own = None if self.scales is None else [take(self.scales, part) for part in (0, 1)]
            pair = None if own is None else jnp.concatenate(own, axis=-1)
            return split_latent(take(self.pool, 0)[..., : self.dim], self.value_dim, pair)
        if parts == 1:
            both = take(self.pool, 0)
            keys, values = both[..., : self.dim], both[..., self.dim :]
        else:
            keys, values = (take(self.pool, part)[..., : self.dim] for part in (0, 1))
        if self.scales is None:
            return keys, values
        return keys * take(self.scales, 0), values * take(self.scales, 1)


def paged_attention_cpu(
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
    pages = _PageReader(pool, scales, layer, q.shape[-1], value_dim)
    finish = _score_function(scale, logit_softcap)
    if query_starts is None:
        return _decode(q, pages, page_table, context_lens, sliding_window, finish, sinks)
    return _prefill(q, pages, page_table, context_lens, query_starts, sliding_window, finish, sinks)


def _score_function(scale: float, logit_softcap: float | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def finish(scores: jax.Array, seen: jax.Array) -> jax.Array:
        scores = scores * scale
        if logit_softcap is not None:
            scores = logit_softcap * jnp.tanh(scores / logit_softcap)
        return jnp.where(seen, scores, -jnp.inf)

    return finish


def _decode(
    q: jax.Array,
    pages: _PageReader,
    page_table: jax.Array,
    context_lens: jax.Array,
    sliding_window: int | None,
    finish: Callable[[jax.Array, jax.Array], jax.Array],
    sinks: jax.Array | None,
) -> jax.Array:
    """All rows side by side: a step of the loop takes the next block of every row."""
    rows, heads, dim = q.shape
    out_dim = pages.value_dim or dim
    kv_heads, page_size = pages.pool.shape[3:5]
    width = page_table.shape[1]
    block = max(1, min(width, DECODE_BLOCK_TOKENS // page_size))
    queries = q.astype(jnp.float32).reshape(rows, kv_heads, heads // kv_heads, dim)
    positions = context_lens - 1
    first_seen = jnp.zeros_like(positions) if sliding_window is None else positions - (sliding_window - 1)
    first_page = jnp.maximum(first_seen, 0) // page_size
    end_page = (context_lens + page_size - 1) // page_size

    def body(step: jax.Array, carry: _Softmax) -> _Softmax:
        index = first_page[:, None] + step * block + jnp.arange(block)
        ids = jnp.take_along_axis(page_table, jnp.minimum(index, width - 1), axis=1)
        ids = jnp.where(index < end_page[:, None], ids, 0)  # a short row idles on one page, which stays in cache
        slots = (index[:, :, None] * page_size + jnp.arange(page_size)).reshape(rows, 1, 1, -1)
        seen = (slots <= positions[:, None, None, None]) & (slots >= first_seen[:, None, None, None])
        keys, values = pages.read(ids)
        scores = jnp.einsum("rkgd,rksd->rkgs", queries, keys, precision=jax.lax.Precision.HIGHEST)
        return carry.add(finish(scores, seen), jnp.where(seen.reshape(rows, 1, -1, 1), values, 0.0))

    group = heads // kv_heads
    start = _Softmax.start(None if sinks is None else sinks.reshape(kv_heads, group), queries.shape[:-1], out_dim)
    steps = (jnp.max(end_page - first_page) + block - 1) // block
    out = jax.lax.fori_loop(0, steps, body, start).result()
    # A padding row has a sink or a masked block at most, never a value; its queries may be NaN.
    return jnp.where((positions >= 0)[:, None, None], out.reshape(rows, heads, out_dim), 0.0).astype(q.dtype)


def _prefill(
    q: jax.Array,
    pages: _PageReader,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    sliding_window: int | None,
    finish: Callable[[jax.Array, jax.Array], jax.Array],
    sinks: jax.Array | None,
) -> jax.Array:
    """One block of a row's queries after another; K and V are read once per block of queries."""
    tokens, heads, dim = q.shape
    out_dim = pages.value_dim or dim
    kv_heads, page_size = pages.pool.shape[3:5]
    group = heads // kv_heads
    width = page_table.shape[1]
    block = max(1, min(width, PREFILL_BLOCK_TOKENS // page_size))
    block_tokens = block * page_size
    size = min(tokens, PREFILL_BLOCK_QUERIES)
    counts = query_starts[1:] - query_starts[:-1]
    ends = jnp.cumsum((counts + size - 1) // size)  # int32[R], blocks of queries up to and with each row
    # Padded so that the last block of queries is a plain slice; [K, G * T, D] order is made per block.
    queries = jnp.pad(q, ((0, size), (0, 0), (0, 0)))
    table = jnp.pad(page_table, ((0, 0), (0, -width % block)))
    start = _Softmax.start(
        None if sinks is None else jnp.repeat(sinks.reshape(kv_heads, group), size, axis=1),
        (kv_heads, group * size),
        out_dim,
    )

    def query_block(item: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)
        done = (item - (ends[row] - (counts[row] + size - 1) // size)) * size
        begin = query_starts[row] + done
        positions = context_lens[row] - counts[row] + done + jnp.arange(size)
        last = jnp.minimum(positions[-1], context_lens[row] - 1)
        mine = jax.lax.dynamic_slice_in_dim(queries, begin, size)
        mine = mine.astype(jnp.float32).reshape(size, kv_heads, group, dim)
        mine = mine.transpose(1, 2, 0, 3).reshape(kv_heads, group * size, dim)

        def kv_block(step: jax.Array, carry: _Softmax) -> _Softmax:
            ids = jax.lax.dynamic_slice(table, (row, step * block), (1, block))
            ids = jnp.where(step * block + jnp.arange(block) <= last // page_size, ids, 0)
            slots = step * block_tokens + jnp.arange(block_tokens)
            seen = slots <= positions[:, None]
            if sliding_window is not None:
                seen &= slots > positions[:, None] - sliding_window
            held = slots <= last
            if sliding_window is not None:
                held &= slots > positions[0] - sliding_window
            keys, values = (x[0] for x in pages.read(ids))
            scores = jnp.einsum("kqd,ksd->kqs", mine, keys, precision=jax.lax.Precision.HIGHEST)
            scores = finish(scores.reshape(kv_heads, group, size, -1), seen).reshape(kv_heads, group * size, -1)
            return carry.add(scores, jnp.where(held[:, None], values, 0.0))

        first = 0 if sliding_window is None else jnp.maximum(positions[0] - sliding_window + 1, 0) // block_tokens
        mixed = jax.lax.fori_loop(first, last // block_tokens + 1, kv_block, start).result()
        mixed = mixed.reshape(kv_heads, group, size, out_dim).transpose(2, 0, 1, 3).reshape(size, heads, out_dim)
        # Beyond the row's end lie the next row's places: leave them as they are.
        valid = (done + jnp.arange(size) < counts[row])[:, None, None]
        old = jax.lax.dynamic_slice_in_dim(out, begin, size)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(valid, mixed.astype(q.dtype), old), begin, 0)

    empty = jnp.zeros((*queries.shape[:2], out_dim), q.dtype)
    return jax.lax.fori_loop(0, ends[-1], query_block, empty)[:tokens]
