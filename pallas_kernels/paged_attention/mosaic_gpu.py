"""Paged attention for NVIDIA GPUs through Pallas' Mosaic GPU backend: choice of kernel, layouts, checks.

Decode runs the mma kernel (`mosaic_gpu_mma`), one tile per row and KV head. Prefill cuts the ragged batch
into tiles of consecutive tokens of one row (`mosaic_gpu_tiles`) and runs the WGMMA kernel
(`mosaic_gpu_wgmma`) for bfloat16 on Hopper, else the mma kernel. What no kernel has is refused by name before
anything is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import QUANTISED_DTYPES
from pallas_kernels.paged_attention import mosaic_gpu_tiles as layouts
from pallas_kernels.paged_attention.mosaic_gpu_common import LOG2E, UNSEEN, Scoring, num_parts
from pallas_kernels.paged_attention.mosaic_gpu_mma import (
    ROWS_KEPT,
    MmaConfig,
    Tiles,
    combine_splits,
    mma_attention,
)
from pallas_kernels.paged_attention.mosaic_gpu_tuning import tune_mma, tune_wgmma
from pallas_kernels.paged_attention.mosaic_gpu_wgmma import TILE_ROWS, WgmmaConfig, wgmma_attention

HEAD_DIMS = (64, 80, 96, 128, 256)
WGMMA_HEAD_DIMS = (64, 128)
MAX_FLOAT32_DIM = 128
QUERY_DTYPES = ("bfloat16", "float32")
MAX_GROUP = 64
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


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
      NotImplementedError: a head dimension, page size, dtype or group size that these kernels do not have.
    """
    _check(q, pool)
    kv_heads, dim = pool.shape[3], pool.shape[5]
    group = q.shape[1] // kv_heads
    scoring = Scoring(float(scale), sliding_window, logit_softcap, 0 if query_starts is None else group)
    where = _Where(pool, jnp.reshape(layer, (1,)).astype(jnp.int32), page_table.astype(jnp.int32), scales)
    if query_starts is None:
        rows = tile_rows(group, pool, prefill=False)
        bounds = layouts.decode_bounds(context_lens, sliding_window)
        kept = next(kept for kept in ROWS_KEPT if kept >= group)
        tiles = Tiles(_query_parts(_rows_by_tile(q, kv_heads, kept, rows)), bounds)
        out = _run_mma(tiles, where, sinks, scoring, rows, kept, q.dtype, interpret)
        return out.reshape(-1, kept, dim)[:, :group].reshape(q.shape)

    wgmma = takes_wgmma(q, pool) and (interpret or on_hopper())
    rows = TILE_ROWS if wgmma else tile_rows(group, pool, prefill=True)
    tile_map = layouts.prefill_tiles(q.shape[0], context_lens, query_starts, rows // group, sliding_window)
    by_tile = layouts.gather_tiles(q, tile_map.tokens, kv_heads, rows)
    if wgmma:
        tuning = tune_wgmma(dim)
        config = WgmmaConfig(tuning.block, tuning.stages, scoring, interpret)
        sinks_by_row = None if sinks is None else _sinks_by_row(sinks, kv_heads, rows)
        out = wgmma_attention(by_tile, tile_map.bounds, pool, where.layer, where.page_table, sinks_by_row, config)
    else:
        tiles = Tiles(_query_parts(by_tile.reshape(-1, dim)), tile_map.bounds)
        out = _run_mma(tiles, where, sinks, scoring, rows, rows, q.dtype, interpret)
    return layouts.scatter_tiles(out.reshape(-1, kv_heads, rows, dim), tile_map, q.shape[1])


class _Where(NamedTuple):
    """Where K and V lie: arguments of `paged_attention`, the layer as int32[1]."""

    pool: jax.Array
    layer: jax.Array
    page_table: jax.Array
    scales: jax.Array | None


def _run_mma(
    tiles: Tiles,
    where: _Where,
    sinks: jax.Array | None,
    scoring: Scoring,
    rows: int,
    rows_kept: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> jax.Array:
    """The mma kernel over `tiles` and, where it was split, the second pass: [N * K * rows_kept, D]."""
    pool, layer, page_table, scales = where
    kv_heads, page_size = pool.shape[3:5]
    tuning = tune_mma(tiles.bounds.shape[0], page_table.shape[1] * page_size, pool, rows, dtype)
    config = MmaConfig(rows, rows_kept, tuning.block, tuning.stages, tuning.splits, scoring, interpret)
    row_scales = None if scales is None else _row_scales(scales, layer[0], page_table, tuning.block)
    split_sinks = None
    if sinks is not None:
        by_row = _sinks_by_row(sinks, kv_heads, rows)
        split_sinks = jnp.full((tuning.splits, *by_row.shape), UNSEEN, jnp.float32).at[0].set(by_row)
    out, lse = mma_attention(tiles, pool, layer, page_table, row_scales, split_sinks, config, dtype)
    return out if lse is None else combine_splits(out, lse, rows_kept, dtype)


def takes_wgmma(q: jax.Array, pool: jax.Array) -> bool:
    """Whether prefill of these is the WGMMA kernel's, on Hopper."""
    return bool(q.dtype == pool.dtype == jnp.bfloat16) and pool.shape[5] in WGMMA_HEAD_DIMS


def on_hopper() -> bool:
    """Whether the program is traced for compute capability 9.0: the mesh's device, else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return any(name in device.device_kind for name in HOPPER_NAMES)
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def _check(q: jax.Array, pool: jax.Array) -> None:
    heads, dim = q.shape[1:]
    kv_heads, page_size = pool.shape[3:5]
    if pool.shape[2] != 2 or pool.shape[5] != dim:
        raise NotImplementedError(f"pool is {pool.shape} for heads of {dim}; mosaic_gpu has [L, P, 2, K, S, D]")
    if dim not in HEAD_DIMS:
        raise NotImplementedError(f"head dimension is {dim}; mosaic_gpu has {_listed(HEAD_DIMS)}")
    if page_size not in (16, 32) and page_size % 64:
        raise NotImplementedError(f"page size is {page_size}; mosaic_gpu has 16, 32 and multiples of 64")
    if q.dtype.name not in QUERY_DTYPES:
        raise NotImplementedError(f"q is {q.dtype.name}; mosaic_gpu has {_listed(QUERY_DTYPES)}")
    if pool.dtype != q.dtype and pool.dtype.name not in QUANTISED_DTYPES:
        raise NotImplementedError(
            f"pool is {pool.dtype.name} and q {q.dtype.name};"
            f" mosaic_gpu has pools of q's dtype, {_listed(QUANTISED_DTYPES)}"
        )
    if pool.dtype == jnp.float32 and dim > MAX_FLOAT32_DIM:
        raise NotImplementedError(
            f"head dimension is {dim} in float32; mosaic_gpu has up to {MAX_FLOAT32_DIM}, which fills shared memory"
        )
    if heads // kv_heads > MAX_GROUP:
        raise NotImplementedError(
            f"{heads} query heads share {kv_heads} KV heads; mosaic_gpu has at most {MAX_GROUP} to one"
        )


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))


def tile_rows(group: int, pool: jax.Array, prefill: bool) -> int:
    """Query rows of a tile of the mma kernel: the fewest that hold a group; in prefill what registers allow.

    With 16 rows four warps share the columns of the output, so D must be a multiple of 32; else 32 rows.
    """
    dim, wanted = pool.shape[5], group
    if prefill:
        wanted = max(group, 64 if pool.dtype == jnp.bfloat16 else 32)
        if dim > 128 or pool.dtype == jnp.float32:
            wanted = group
    return next(rows for rows in (16, 32, 64) if rows >= wanted and (rows > 16 or dim % 32 == 0))


def _rows_by_tile(q: jax.Array, kv_heads: int, kept: int, rows: int) -> jax.Array:
    """Queries of decode as [R * K * kept, D], a group to `kept` rows; no copy where a group has as many.

    At least `rows` rows. TMA gives zeros for what the last tile reads beyond the end.
    """
    by_tile = q.reshape(q.shape[0], kv_heads, -1, q.shape[2])
    by_tile = jnp.pad(by_tile, ((0, 0), (0, 0), (0, kept - by_tile.shape[2]), (0, 0))).reshape(-1, q.shape[2])
    return jnp.pad(by_tile, ((0, max(0, rows - by_tile.shape[0])), (0, 0)))


def _query_parts(q_rows: jax.Array) -> jax.Array:
    """Query rows as bfloat16[parts, X, D] that add up; `reduce_precision` because XLA may drop mere casts."""
    if q_rows.dtype == jnp.bfloat16:
        return q_rows[None]
    parts, rest = [], q_rows
    for _ in range(num_parts(q_rows.dtype)):
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)


def _row_scales(scales: jax.Array, layer: jax.Array, page_table: jax.Array, block: int) -> jax.Array:
    """Scales in token order, float32[R * K, 2, W * S rounded up to blocks]."""
    kv_heads, page_size = scales.shape[3:]
    rows, width = page_table.shape
    own = scales[layer, page_table].transpose(0, 3, 2, 1, 4)  # [R, K, 2, W, S]
    own = own.reshape(rows * kv_heads, 2, width * page_size)
    return jnp.pad(own, ((0, 0), (0, 0), (0, -own.shape[2] % block)))


def _sinks_by_row(sinks: jax.Array, kv_heads: int, rows: int) -> jax.Array:
    """Sinks in units of log2 for every row of a tile, float32[K, rows]; row `i` is head `i % G` of the group."""
    by_head = jnp.maximum(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2E, UNSEEN)
    return by_head[:, jnp.arange(rows) % by_head.shape[1]]
