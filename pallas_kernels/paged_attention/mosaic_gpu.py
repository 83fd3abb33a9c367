"""Paged attention for NVIDIA GPUs through Pallas' Mosaic GPU backend: choice of kernel, layouts, checks.

Decode runs the mma kernel (`mosaic_gpu_mma`), one tile per row and KV head. Prefill cuts the ragged batch
into tiles of consecutive tokens of one row (`mosaic_gpu_tiles`). What a kernel cannot do is refused by name
before anything is compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import mosaic_gpu_tiles as layouts
from pallas_kernels.paged_attention.mosaic_gpu_mma import (
    LOG2E,
    UNSEEN,
    MmaConfig,
    Tiles,
    combine_splits,
    mma_attention,
    num_parts,
)
from pallas_kernels.paged_attention.mosaic_gpu_tuning import Tuning, tune_mma

HEAD_DIMS = (64, 80, 96, 128, 256)
QUERY_DTYPES = ("bfloat16", "float32")
QUANTISED_DTYPES = ("int8", "float8_e4m3fn")
MAX_GROUP = 64


def paged_attention_mosaic_gpu(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    *,
    scales: jax.Array | None = None,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.api.paged_attention`.

    Args:
      q, pool, layer, page_table, context_lens, query_starts: as there.
      scales: float32[L, P, 2, K, S] of an int8 or float8_e4m3fn pool, else None; what lies beyond a
        context may be anything.
      scale, sliding_window, logit_softcap: as there; static.
      sinks: float[H] or None.
      interpret: run in the Mosaic GPU interpreter, on any machine, with race detection.

    Returns:
      [T, H, D] in q's dtype; zeros for padding.

    Raises:
      ValueError: a head dimension, page size, dtype or group size that these kernels do not have.
    """
    _check(q, pool, scales)
    kv_heads, page_size, dim = pool.shape[3:]
    group = q.shape[1] // kv_heads
    rows = _tile_rows(group, dim, prefill=query_starts is not None)
    tile_map = None
    if query_starts is None:
        bounds = layouts.decode_bounds(context_lens, sliding_window)
        tiles = Tiles(_query_parts(_padded(q.reshape(-1, dim), rows)), group, bounds)
        rows_kept, rows_per_token = group, 0
    else:
        tile_map = layouts.prefill_tiles(q.shape[0], context_lens, query_starts, rows // group, sliding_window)
        by_tile = layouts.gather_tiles(q, tile_map.tokens, kv_heads, rows)
        tiles = Tiles(_query_parts(by_tile.reshape(-1, dim)), rows, tile_map.bounds)
        rows_kept, rows_per_token = rows, group
    max_tokens = page_table.shape[1] * page_size
    tuning = tune_mma(tiles.bounds.shape[0], kv_heads, max_tokens, dim, rows, q.dtype, pool.dtype)
    config = MmaConfig(
        rows=rows,
        rows_kept=rows_kept,
        rows_per_token=rows_per_token,
        block=tuning.block,
        stages=tuning.stages,
        splits=tuning.splits,
        scale=float(scale),
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        interpret=interpret,
    )
    out, lse = mma_attention(
        tiles,
        pool,
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        page_table.astype(jnp.int32),
        None if scales is None else _row_scales(scales, layer, page_table, tuning),
        None if sinks is None else _sinks_by_row(sinks, kv_heads, rows, tuning.splits),
        config,
        q.dtype,
    )
    if lse is not None:
        out = combine_splits(out, lse, rows_kept, q.dtype)
    if tile_map is None:
        return out.reshape(q.shape)
    return layouts.scatter_tiles(out.reshape(-1, kv_heads, rows, dim), tile_map, q.shape[1])


def _check(q: jax.Array, pool: jax.Array, scales: jax.Array | None) -> None:
    heads, dim = q.shape[1:]
    kv_heads, page_size = pool.shape[3:5]
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dimension is {dim}; mosaic_gpu has {', '.join(map(str, HEAD_DIMS))}")
    if page_size not in (16, 32) and page_size % 64:
        raise ValueError(f"page size is {page_size}; mosaic_gpu has 16, 32 and multiples of 64")
    if q.dtype.name not in QUERY_DTYPES:
        raise ValueError(f"q is {q.dtype.name}; mosaic_gpu has {' and '.join(QUERY_DTYPES)}")
    quantised = pool.dtype.name in QUANTISED_DTYPES
    if not quantised and pool.dtype != q.dtype:
        raise ValueError(
            f"pool is {pool.dtype.name} and q {q.dtype.name};"
            f" mosaic_gpu has pools of q's dtype, {' and '.join(QUANTISED_DTYPES)}"
        )
    if quantised != (scales is not None):
        raise ValueError(
            f"pool is {pool.dtype.name} {'without' if quantised else 'with'} scales; int8 and fp8 need them"
        )
    if heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} query heads share {kv_heads} KV heads; mosaic_gpu has at most {MAX_GROUP} to one")


def _tile_rows(group: int, dim: int, prefill: bool) -> int:
    """Query rows of a tile: the fewest that hold a group, as the matrix instruction allows; 64 in prefill.

    With 16 rows four warps share the columns of the output, so D must be a multiple of 32; else 32 rows.
    """
    if prefill or group > 32:
        return 64
    return 16 if group <= 16 and dim % 32 == 0 else 32


def _padded(q_rows: jax.Array, rows: int) -> jax.Array:
    """Query rows with as many behind the last as the last tile reads beyond it."""
    return jnp.pad(q_rows, ((0, rows), (0, 0)))


def _query_parts(q_rows: jax.Array) -> jax.Array:
    """Query rows as bfloat16[parts, X, D] that add up; `reduce_precision` because XLA may drop mere casts."""
    parts, rest = [], q_rows
    for _ in range(num_parts(q_rows.dtype)):
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)


def _row_scales(scales: jax.Array, layer: jax.Array, page_table: jax.Array, tuning: Tuning) -> jax.Array:
    """Scales in token order, float32[R * K, 2, W * S rounded up to blocks]."""
    kv_heads, page_size = scales.shape[3:]
    rows, width = page_table.shape
    own = scales[layer, page_table].transpose(0, 3, 2, 1, 4)  # [R, K, 2, W, S]
    own = own.reshape(rows * kv_heads, 2, width * page_size)
    return jnp.pad(own, ((0, 0), (0, 0), (0, -own.shape[2] % tuning.block)))


def _sinks_by_row(sinks: jax.Array, kv_heads: int, rows: int, splits: int) -> jax.Array:
    """Sinks in units of log2 for every row of a tile, float32[splits, K, M], all in the first split."""
    by_head = jnp.maximum(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2E, UNSEEN)
    by_row = by_head[:, jnp.arange(rows) % by_head.shape[1]]
    return jnp.full((splits, *by_row.shape), UNSEEN, jnp.float32).at[0].set(by_row)
