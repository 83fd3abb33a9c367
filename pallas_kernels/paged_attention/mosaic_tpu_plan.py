"""How a call is cut up: sizes of blocks, from static shapes, and the list of items, from the rows.

An item is a block of up to Q query tokens of one row (Q = 1 in decode) with all their heads. Items are
numbered; core c of CORES takes items c, c + CORES, ... in order. An item without work is dead (`end` 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import token_rows

CORES = 2
"""Items are dealt to this many cores: v4 and v5p have two behind one device; elsewhere one runs both shares."""

LANES = 128
BLOCK_BYTES = 1 << 20
"""K and V bytes of a block: enough in flight to cover the latency of HBM (about 1 us at 0.8 to 3.7 TB/s)."""
MIN_BLOCK_TOKENS = 128
MAX_DECODE_TOKENS, MAX_PREFILL_TOKENS = 1024, 512
"""A block computes all its tokens, also those that a short row lacks; in prefill its scores take VMEM."""
MAX_ROWS = 512
"""Rows (query tokens times heads of a group) that share one read of K and V in prefill."""


@dataclass(frozen=True)
class Form:
    """What is static about a call.

    Attributes:
      kv_heads, group: K, and query heads per KV head.
      block_queries, rows: Q, and M >= Q * group rows per KV head: row g * Q + i is head g of query i.
      page_size, pages_per_block: S, and pages copied and computed at a time.
      width: E, lanes of a row of the pool.
      parts: 2: keys and values are apart; 1: they share a row.
      dtype: of the matrix products' operands.
      quantised: the pool holds int8 or float8_e4m3fn, with scales.
      has_sinks: sinks are given.
      scale, sliding_window, logit_softcap: as in the contract.
    """

    kv_heads: int
    group: int
    block_queries: int
    rows: int
    page_size: int
    pages_per_block: int
    width: int
    parts: int
    dtype: Any
    quantised: bool
    has_sinks: bool
    scale: float
    sliding_window: int | None
    logit_softcap: float | None

    @property
    def block_tokens(self) -> int:
        """Tokens of a K/V block; a multiple of 128."""
        return self.page_size * self.pages_per_block


class Blocks(NamedTuple):
    """Static sizes: pages per K/V block, query tokens per item, rows per KV head of an item."""

    pages: int
    queries: int
    rows: int


class Items(NamedTuple):
    """int32[N] each unless said otherwise; N is a multiple of CORES.

    Attributes:
      row: of the page table.
      position: of the first query in its sequence.
      begin, end: the keys that any of the queries sees; end 0: dead.
      block: of queries and of outputs, to read and write.
      next_live: int32[N + CORES + 1], the first live item at or after this one on the same core; N: none.
    """

    row: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    block: jax.Array
    next_live: jax.Array

    @property
    def count(self) -> int:
        """N."""
        return self.row.shape[0]


class Tokens(NamedTuple):
    """Where prefill tokens lie in blocks.

    Attributes:
      of_block: int32[N, Q], the token of each query of each block; any token where there is none.
      place: int32[T], block * Q + query of each token; -1 for padding.
    """

    of_block: jax.Array
    place: jax.Array


def choose_blocks(
    *, num_queries: int, group: int, kv_heads: int, page_size: int, width: int, compute_bytes: int, page_bytes: int
) -> Blocks:
    """Sizes for a call: README.md, "Block sizes", has the table and its source.

    Args:
      num_queries: 1 for decode, else the number of query tokens.
      width: lanes of a row of the pool.
      compute_bytes: of a number in the matrix products.
      page_bytes: K and V of one page in one layer.
    """
    step = LANES // math.gcd(page_size, LANES)  # pages whose tokens fill whole vector registers
    tokens = BLOCK_BYTES * page_size // page_bytes
    most = MAX_DECODE_TOKENS if num_queries == 1 else MAX_PREFILL_TOKENS
    tokens = max(MIN_BLOCK_TOKENS, min(tokens, most))
    pages = max(1, tokens // (step * page_size)) * step
    sublanes = 32 // compute_bytes
    if num_queries == 1:
        return Blocks(pages, 1, -(-group // sublanes) * sublanes)
    # The rows of all heads, in float32 with their sums and maxima, share VMEM.
    most = min(MAX_ROWS, 8192 * LANES // (max(kv_heads, 4) * width))
    queries = sublanes
    while queries * 2 * group <= most and queries < num_queries:
        queries *= 2
    return Blocks(pages, queries, queries * group)


def vmem_bytes(form: Form, block_bytes: int) -> int:
    """What the kernel's buffers take, and room for two blocks of scores and probabilities."""
    rows = form.kv_heads * form.rows
    state = rows * 4 * (form.width + 2 * LANES)
    blocks = 2 * 2 * rows * form.width * block_bytes
    tokens = form.pages_per_block * form.page_size
    pool_bytes = 1 if form.quantised else form.dtype.itemsize
    pages = 2 * form.parts * form.kv_heads * tokens * form.width * pool_bytes
    scales = 2 * 2 * form.kv_heads * tokens * 4 if form.quantised else 0
    sinks = 2 * rows * 4 * LANES if form.has_sinks else 0
    scores = 6 * form.rows * tokens * 4
    return state + blocks + pages + scales + sinks + scores + (4 << 20)


def decode_items(context_lens: jax.Array, sliding_window: int | None) -> Items:
    """One item per row, then dead ones up to a multiple of CORES."""
    rows = context_lens.shape[0]
    end = jnp.pad(context_lens, (0, -rows % CORES))
    index = jnp.arange(end.shape[0], dtype=jnp.int32)
    return _items(jnp.minimum(index, rows - 1), end - 1, end, index, sliding_window)


def prefill_items(
    num_tokens: int,
    context_lens: jax.Array,
    query_starts: jax.Array,
    sliding_window: int | None,
    *,
    block_queries: int,
) -> tuple[Items, Tokens]:
    """Each row's queries in blocks, row after row; then dead items, which have a block per core to themselves."""
    rows = context_lens.shape[0]
    counts = jnp.where(context_lens > 0, query_starts[1:] - query_starts[:-1], 0)
    blocks = (counts + block_queries - 1) // block_queries
    ends = jnp.cumsum(blocks)
    starts = ends - blocks
    size = num_tokens // block_queries + min(rows, num_tokens)
    size += -size % CORES
    index = jnp.arange(size, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), rows - 1)
    live = index < ends[-1]
    done = (index - starts[row]) * block_queries
    position = context_lens[row] - counts[row] + done
    end = jnp.where(live, position + jnp.minimum(block_queries, counts[row] - done), 0)
    items = _items(row, position, end, jnp.where(live, index, size + index % CORES), sliding_window)

    query = jnp.arange(block_queries, dtype=jnp.int32)
    of_block = jnp.where(live, query_starts[row] + done, 0)[:, None] + query
    of_block = jnp.pad(jnp.minimum(of_block, num_tokens - 1), ((0, CORES), (0, 0)))
    of_token, positions = token_rows(num_tokens, context_lens, query_starts)
    nth = jnp.arange(num_tokens, dtype=jnp.int32) - query_starts[of_token]
    place = jnp.where(positions >= 0, starts[of_token] * block_queries + nth, -1)
    return items, Tokens(of_block, place)


def _items(row: jax.Array, position: jax.Array, end: jax.Array, block: jax.Array, sliding_window: int | None) -> Items:
    num_items = row.shape[0]
    begin = jnp.zeros_like(position)
    if sliding_window is not None:
        begin = jnp.maximum(position - (sliding_window - 1), 0)
    index = jnp.arange(num_items, dtype=jnp.int32)
    live = jnp.where(end > 0, index, num_items).reshape(-1, CORES)
    next_live = jax.lax.cummin(live, axis=0, reverse=True).reshape(-1)
    next_live = jnp.pad(next_live, (0, CORES + 1), constant_values=num_items)
    return Items(row, position, begin, end, block, next_live)
