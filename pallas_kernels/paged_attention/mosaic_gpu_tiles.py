"""Query tiles of a ragged batch: which tokens of which row each tile holds, by arithmetic on query_starts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import token_rows


class TileMap(NamedTuple):
    """Where the tokens of a ragged batch lie in tiles of at most B tokens, each of one row.

    Attributes:
      tokens: int32[N, B], query token of every place; what lies beyond the row is any token.
      bounds: int32[N, 4]: table row, first and end of the keys that any query of the tile sees, position
        of the first query. First equals end where the tile is empty.
      tile_of, place_of: int32[T], tile and place of each token; any for padding.
      live: bool[T], False for padding.
    """

    tokens: jax.Array
    bounds: jax.Array
    tile_of: jax.Array
    place_of: jax.Array
    live: jax.Array


def decode_bounds(context_lens: jax.Array, sliding_window: int | None) -> jax.Array:
    """int32[R, 4] as in `TileMap`, one tile for the last token of each row."""
    rows = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
    first = jnp.zeros_like(context_lens)
    if sliding_window is not None:
        first = jnp.maximum(context_lens - sliding_window, 0)
    return jnp.stack([rows, first, context_lens, context_lens - 1], axis=1).astype(jnp.int32)


def prefill_tiles(
    num_tokens: int,
    context_lens: jax.Array,
    query_starts: jax.Array,
    tile_tokens: int,
    sliding_window: int | None,
) -> TileMap:
    """Cuts every row's tokens into tiles of `tile_tokens`; N = ceil(T / tile_tokens) + R, the most there can be."""
    num_rows = context_lens.shape[0]
    num_tiles = -(-num_tokens // tile_tokens) + num_rows
    starts = query_starts.astype(jnp.int32)
    counts = jnp.where(context_lens > 0, starts[1:] - starts[:-1], 0)
    tile_ends = jnp.cumsum((counts + tile_tokens - 1) // tile_tokens, dtype=jnp.int32)
    tile_starts = tile_ends - (counts + tile_tokens - 1) // tile_tokens

    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(tile_ends, tiles, side="right"), num_rows - 1).astype(jnp.int32)
    offset = (tiles - tile_starts[row]) * tile_tokens
    held = jnp.clip(counts[row] - offset, 0, tile_tokens)
    position = context_lens[row] - counts[row] + offset
    first = jnp.zeros_like(position)
    if sliding_window is not None:
        first = jnp.maximum(position - sliding_window + 1, 0)
    end = jnp.where(held > 0, position + held, 0)
    bounds = jnp.stack([row, jnp.minimum(first, end), end, position], axis=1).astype(jnp.int32)
    tokens = starts[row][:, None] + offset[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)

    token_row, token_position = token_rows(num_tokens, context_lens, query_starts)
    index = jnp.arange(num_tokens, dtype=jnp.int32) - starts[token_row]
    return TileMap(
        jnp.clip(tokens, 0, num_tokens - 1),
        bounds,
        jnp.clip(tile_starts[token_row] + index // tile_tokens, 0, num_tiles - 1),
        index % tile_tokens,
        token_position >= 0,
    )


def gather_tiles(q: jax.Array, tokens: jax.Array, kv_heads: int, rows: int) -> jax.Array:
    """q [T, H, D] by tiles: [N, K, rows, D]; row `i` is head `i % G` of the group for the tile's token `i // G`."""
    heads, dim = q.shape[1:]
    group = heads // kv_heads
    tiles = q[tokens].reshape(*tokens.shape, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    tiles = tiles.reshape(tokens.shape[0], kv_heads, -1, dim)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, rows - tiles.shape[2]), (0, 0)))


def scatter_tiles(out: jax.Array, tile_map: TileMap, heads: int) -> jax.Array:
    """The inverse of `gather_tiles`: [N, K, rows, D] to [T, H, D], zeros for padding."""
    kv_heads = out.shape[1]
    group = heads // kv_heads
    rows = tile_map.place_of[:, None] * group + jnp.arange(group, dtype=jnp.int32)
    picked = out[tile_map.tile_of[:, None, None], jnp.arange(kv_heads)[None, :, None], rows[:, None, :]]
    picked = picked.reshape(rows.shape[0], heads, -1)
    return jnp.where(tile_map.live[:, None, None], picked, jnp.zeros((), out.dtype))
