"""Paged attention for TPU: one Pallas kernel for decode and for ragged prefill.

This file checks the arguments, lays queries out in blocks and calls the kernel; the work list is made in
`mosaic_tpu_plan.py`, the kernel is in `mosaic_tpu_kernel.py`. README.md tells why it is built as it is.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.pool import QUANTISED_DTYPES
from pallas_kernels.paged_attention.mosaic_tpu_kernel import attend_items, scratch_shapes
from pallas_kernels.paged_attention.mosaic_tpu_plan import (
    CORES,
    LANES,
    Form,
    Items,
    choose_blocks,
    decode_items,
    prefill_items,
    vmem_bytes,
)

DEFAULT_VMEM_BYTES = 16 * 2**20
MAX_VMEM_BYTES = 48 * 2**20


def paged_attention_mosaic_tpu(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    *,
    scales: jax.Array | None = None,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    sinks: jax.Array | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.api.paged_attention`; what differs is said here.

    Args:
      q: [T, H, D], bfloat16 or float32.
      pool: [L, P, 2, K, S, D], or one of two forms for D that is no multiple of 128:
        [L, P, 2, K, S, E], E the next multiple of 128: what lies beyond D is finite (its value is not used);
        [L, P, 1, K, S, 2 * D], 2 * D a multiple of 128: keys, then values, in the last dimension.
      scales: float32[L, P, 2, K, S] of an int8 or float8_e4m3fn pool, S a multiple of 128; else None.
      interpret: run in the Pallas TPU interpreter, with race detection; or that interpreter's parameters.
        The interpreter takes every head dimension and page size.

    Raises:
      NotImplementedError: the kernel does not exist for these shapes and dtypes; the message says for which
        it does.
    """
    _check_forms(q, pool, scales)
    form = form_of(q, pool, query_starts, scale, sliding_window, logit_softcap, sinks is not None)
    if not interpret:
        _check_compiles(form, pool, q.shape[-1])
    if query_starts is None:
        items = decode_items(context_lens, sliding_window)
        blocks = _decode_blocks(q, form, items.count)
    else:
        items, tokens = prefill_items(
            q.shape[0], context_lens, query_starts, sliding_window, block_queries=form.block_queries
        )
        blocks = _prefill_blocks(q, form, tokens.of_block)
    out = _call(form, items, layer, blocks, page_table, pool, scales, sinks, interpret)
    value_lane = q.shape[-1] if pool.shape[2] == 1 else 0
    out = out[..., value_lane : value_lane + q.shape[-1]].astype(q.dtype)
    if query_starts is None:
        return out[: q.shape[0], :, : form.group].reshape(q.shape)
    return _gather_tokens(out, form, tokens.place, q.shape)


def _check_forms(q: jax.Array, pool: jax.Array, scales: jax.Array | None) -> None:
    """Raises for pools and dtypes that no kernel here takes, interpreted or not."""
    dim, parts, width = q.shape[-1], pool.shape[2], pool.shape[5]
    if width not in ((2 * dim,) if parts == 1 else (dim, _round_up(dim, LANES))):
        raise NotImplementedError(
            f"pool is {pool.shape} for queries of {dim}; on TPU it must be [L, P, 2, K, S, D],"
            " [L, P, 2, K, S, D rounded up to 128] or [L, P, 1, K, S, 2 * D]"
        )
    if q.dtype.name not in ("bfloat16", "float32"):
        raise NotImplementedError(f"q is {q.dtype}; on TPU queries must be bfloat16 or float32")
    if pool.dtype.name not in ("bfloat16", "float32", *QUANTISED_DTYPES):
        raise NotImplementedError(
            f"the pool is {pool.dtype}; on TPU it must be bfloat16, float32 or {' or '.join(QUANTISED_DTYPES)}"
        )
    wanted = (*pool.shape[:2], 2, *pool.shape[3:5])
    if scales is not None and scales.shape != wanted:
        raise ValueError(f"scales are {scales.shape} for a pool {pool.shape}; they must be {wanted}")


def form_of(
    q: jax.Array,
    pool: jax.Array,
    query_starts: jax.Array | None,
    scale: float = 1.0,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    has_sinks: bool = False,
) -> Form:
    """What is static about a call; of arrays only shapes and dtypes are used."""
    _, _, parts, kv_heads, page_size, width = pool.shape
    quantised = pool.dtype.name in QUANTISED_DTYPES
    dtype = q.dtype if quantised else jnp.promote_types(q.dtype, pool.dtype)
    group = q.shape[1] // kv_heads
    blocks = choose_blocks(
        num_queries=1 if query_starts is None else q.shape[0],
        group=group,
        kv_heads=kv_heads,
        page_size=page_size,
        width=width,
        compute_bytes=dtype.itemsize,
        page_bytes=parts * kv_heads * page_size * width * pool.dtype.itemsize,
    )
    return Form(
        kv_heads=kv_heads,
        group=group,
        block_queries=blocks.queries,
        rows=blocks.rows,
        page_size=page_size,
        pages_per_block=blocks.pages,
        width=width,
        parts=parts,
        dtype=dtype,
        quantised=quantised,
        has_sinks=has_sinks,
        scale=float(scale),
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
    )


def _check_compiles(form: Form, pool: jax.Array, dim: int) -> None:
    """Raises for what the compiler refuses, or compiles to something useless."""
    if form.width % LANES:
        remedy = "[L, P, 2, K, S, D rounded up to 128], the rest zeros"
        if 2 * dim % LANES == 0:
            remedy = "[L, P, 1, K, S, 2 * D], keys and values side by side"
        raise NotImplementedError(
            f"the pool's last dimension is {form.width}; on TPU it must be a multiple of 128, since XLA would copy"
            f" the whole pool at every step to pad it: for head_dim {dim} make the pool {remedy}"
        )
    if form.page_size % 16:
        raise NotImplementedError(f"page_size is {form.page_size}; on TPU it must be a multiple of 16")
    if form.quantised and form.page_size % LANES:
        raise NotImplementedError(
            f"page_size is {form.page_size} in a pool of {pool.dtype}; on TPU it must be a multiple of 128, since"
            " XLA would copy all scales at every step to pad a page of them to 128"
        )


def _decode_blocks(q: jax.Array, form: Form, num_items: int) -> jax.Array:
    """[N, K, M, E]: a block for every row, the heads of a group in its rows, zeros in the rest."""
    rows, _, dim = q.shape
    grouped = q.reshape(rows, form.kv_heads, form.group, dim).astype(form.dtype)
    return jnp.pad(grouped, ((0, num_items - rows), (0, 0), (0, form.rows - form.group), (0, form.width - dim)))


def _prefill_blocks(q: jax.Array, form: Form, of_block: jax.Array) -> jax.Array:
    """[N, K, G * Q, E]: the tokens `of_block` int32[N, Q], heads of a group one after another."""
    _, _, dim = q.shape
    blocks = q.astype(form.dtype)[of_block]  # [N, Q, H, D]
    blocks = blocks.reshape(*of_block.shape, form.kv_heads, form.group, dim).transpose(0, 2, 3, 1, 4)
    blocks = blocks.reshape(of_block.shape[0], form.kv_heads, form.rows, dim)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, form.width - dim)))


def _gather_tokens(out: jax.Array, form: Form, place: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[T, H, D] from blocks [N, K, G * Q, D]; `place` int32[T] is block * Q + query, -1 for padding."""
    num_items, _, _, dim = out.shape
    by_token = out.reshape(num_items, form.kv_heads, form.group, form.block_queries, dim).transpose(0, 3, 1, 2, 4)
    by_token = by_token.reshape(num_items * form.block_queries, *shape[1:])
    return jnp.where((place >= 0)[:, None, None], by_token[jnp.maximum(place, 0)], 0)


def _call(
    form: Form,
    items: Items,
    layer: jax.Array,
    blocks: jax.Array,
    page_table: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    sinks: jax.Array | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The kernel's outputs, one [K, M, E] block per item and one more per core that is never read."""

    def block_of(core: jax.Array, step: jax.Array, layer: jax.Array, *fields: jax.Array) -> tuple[jax.Array, ...]:
        return (Items(*fields).block[step * CORES + core], 0, 0, 0)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    block_spec = pl.BlockSpec((1, *blocks.shape[1:]), block_of)
    inputs = [(blocks, block_spec), (page_table[:, None, :], hbm), (pool, hbm)]
    if scales is not None:
        inputs.append((scales, hbm))
    if sinks is not None:
        by_row = jnp.repeat(sinks.astype(jnp.float32).reshape(form.kv_heads, form.group), form.block_queries, axis=1)
        by_row = jnp.pad(by_row, ((0, 0), (0, form.rows - by_row.shape[1])))[..., None]
        inputs.append((by_row, pl.BlockSpec(by_row.shape, lambda *_: (0, 0, 0))))
    needed = vmem_bytes(form, blocks.dtype.itemsize)
    if needed > MAX_VMEM_BYTES:
        raise NotImplementedError(
            f"{form.kv_heads} KV heads with pages of {form.page_size} need {needed} bytes of VMEM, of"
            f" {MAX_VMEM_BYTES} that may be used on TPU; use smaller pages or shard KV heads over devices"
        )
    call = pl.pallas_call(
        partial(attend_items, form),
        out_shape=jax.ShapeDtypeStruct(blocks.shape, blocks.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(items),
            grid=(CORES, items.count // CORES),
            in_specs=[spec for _, spec in inputs],
            out_specs=block_spec,
            scratch_shapes=scratch_shapes(form, pool.dtype, page_table.shape[1]),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,  # of page ids, by the caller's contract; they cost as much as the copies
            vmem_limit_bytes=needed if needed > DEFAULT_VMEM_BYTES else None,
        ),
        cost_estimate=_cost(form, blocks, page_table, pool),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret is True else interpret,
        name="paged_attention_decode" if form.block_queries == 1 else "paged_attention_prefill",
    )
    return call(jnp.asarray(layer, jnp.int32).reshape(1), *items, *(value for value, _ in inputs))


def _cost(form: Form, blocks: jax.Array, page_table: jax.Array, pool: jax.Array) -> pl.CostEstimate:
    """For XLA's scheduler, which sees neither copies nor loops of a kernel; rows are taken to be full."""
    num_rows, table_width = page_table.shape
    num_items = blocks.shape[0]
    tokens = table_width * form.page_size
    page_bytes = form.parts * form.kv_heads * form.page_size * form.width * pool.dtype.itemsize
    reads = num_rows if form.block_queries == 1 else num_items
    scores = num_items * form.kv_heads * form.rows * tokens
    return pl.CostEstimate(
        flops=4 * scores * form.width,
        transcendentals=scores,
        bytes_accessed=reads * table_width * page_bytes + 2 * blocks.size * blocks.dtype.itemsize,
    )


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
