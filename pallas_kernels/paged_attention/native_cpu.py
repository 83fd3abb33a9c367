"""Paged attention for CPUs, compiled by numba and called by XLA.

XLA's CPU backend runs the loops of `cpu` as dozens of small operations per block of keys. Here a layer's attention is
one call: items (a row's queries, up to `QUERY_BLOCK` of them, and a KV head) are shared among XLA's threads, and each
streams its pages through a softmax that is renormalised as it goes (`native_cpu_softmax`), block by block. Few queries,
as in decode, read keys and values where they lie (`native_cpu_few`); for more they are packed (`native_cpu_block`).

A query's result has the same bits whatever is computed beside it, chunked or not: blocks of keys are aligned to the
sequence, a row's sums do not depend on the tile it is in, and what a query does not see of its own request's keys and
values, which are finite, counts zero; both ways sum in one order. Anything else in the pool is not read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from pallas_kernels.common.cpu_calls import KEPT, argument, register, result, result_bytes, source_version, words
from pallas_kernels.common.cpu_values import (
    KINDS,
    OPTIONS,
    array_at,
    item_bytes,
    load,
    pointer_f32,
    pointer_i32,
    pointer_i64,
    pointer_u16,
    store,
    store_as,
)
from pallas_kernels.common.native import NATIVE_DTYPES
from pallas_kernels.matmul import native_cpu as products
from pallas_kernels.matmul import tile
from pallas_kernels.matmul.native_cpu import STEP_BYTES, multiply_rows
from pallas_kernels.matmul.tile import COLUMNS, factor_kind
from pallas_kernels.paged_attention import native_cpu_block, native_cpu_few, native_cpu_softmax
from pallas_kernels.paged_attention.native_cpu_block import (
    ADDRESSES,
    DISTANCE,
    ORDER,
    copy_rows,
    exp,
    find_rows,
    line_up,
    pack_keys,
    pack_values,
)
from pallas_kernels.paged_attention.native_cpu_few import MOST_FEW, few_scores, few_sums
from pallas_kernels.paged_attention.native_cpu_softmax import KEY_BLOCK, NEVER, STATE, renew, soften

SOURCES = tuple(
    str(module.__file__) for module in (native_cpu_block, native_cpu_few, native_cpu_softmax, products, tile)
)
"""Files whose functions are called here."""

QUERY_BLOCK = 32
"""Query tokens of an item."""

_NEVER = np.float32(NEVER)


@njit(**OPTIONS)
def scratch_words(kind, rows, dim):
    """Words of 8 bytes that `attend` needs for `rows` queries (tokens times query heads of a KV head)."""
    tiled, wide = _rounded_up(rows, 4), _rounded_up(dim, COLUMNS)
    numbers = tiled * (wide + KEY_BLOCK) * item_bytes(factor_kind(kind)) + (2 * KEY_BLOCK + 1) * wide * item_bytes(kind)
    return (numbers + 4 * tiled * (KEY_BLOCK + 2 * wide + STATE)) // 8 + 4 * (KEY_BLOCK + ADDRESSES) + ORDER + 16


@njit(**OPTIONS)
def aligned(address):
    """The next multiple of 64."""
    return (address + 63) // 64 * 64


@njit(**OPTIONS)
def _rounded_up(count, size):
    return (count + size - 1) // size * size


@njit(**OPTIONS)
def _rows_at(address):
    """Addresses of the keys and the values of a block, see `find_rows`."""
    return carray(pointer_i64(address), (2, KEY_BLOCK + ADDRESSES))


@njit(**OPTIONS)
def attend(kind, q, pool, layer, queries, options, sinks, out, scratch, after):
    """A block of queries of one row over a KV head.

    Args:
      kind: of what is multiplied, see `KINDS`: bfloat16 where queries and pool are, else float32.
      queries: page table of the row, KV head, first query and count, and the first one's position.
      options: scale, window, softcap.
      scratch: address of `scratch_words`, at a multiple of 64.
      after: page table, KV head, first token and end of what the thread will attend to next, which is fetched ahead.
    """
    pages, head, begin, count, position = queries
    scale, window, softcap = options
    dim = q.shape[2]
    group = q.shape[1] // pool.shape[3]
    rows = count * group
    tiled, wide, size = _rounded_up(rows, 4), _rounded_up(dim, COLUMNS), item_bytes(kind)
    factor = factor_kind(kind)
    scores = array_at(np.float32(0), scratch, (tiled, KEY_BLOCK))
    scratch += 4 * tiled * KEY_BLOCK
    added = array_at(np.float32(0), scratch, (tiled, wide))
    scratch += 4 * tiled * wide
    sums = array_at(np.float32(0), scratch, (tiled, wide))
    scratch += 4 * tiled * wide
    states = array_at(np.float32(0), scratch, (tiled, STATE))
    scratch += 4 * tiled * STATE
    x = array_at(factor, scratch, (tiled, wide))
    scratch += item_bytes(factor) * tiled * wide
    block = array_at(kind, scratch, (KEY_BLOCK + 1, wide))
    scratch += size * (KEY_BLOCK + 1) * wide
    scratch = aligned(scratch)
    held, ahead = _rows_at(scratch), _rows_at(scratch + 16 * (KEY_BLOCK + ADDRESSES))
    scratch += 32 * (KEY_BLOCK + ADDRESSES)
    order = words(scratch, ORDER)
    scratch += 8 * ORDER
    packed = scratch
    scratch += size * KEY_BLOCK * wide
    weights = array_at(factor, scratch, (tiled, KEY_BLOCK))

    block[KEY_BLOCK] = 0
    sums[:] = np.float32(0)
    x[rows:], x[:, dim:], weights[rows:] = 0, 0, 0
    for i in range(rows):
        t, h = i // group, head * group + i % group
        for d in range(dim):
            store(x, (i, d), load(q[begin + t, h, d]))
        states[i, 0], states[i, 1] = _NEVER, np.float32(0)
        if sinks.shape[0] and sinks[h] > _NEVER:
            states[i, 0], states[i, 1] = sinks[h], np.float32(1)
    end = position + count
    oldest = max(position - window + 1, 0)
    first = oldest // KEY_BLOCK * KEY_BLOCK
    zeros, few = block[KEY_BLOCK].ctypes.data, rows <= MOST_FEW
    find_rows(pool, layer, pages, head, first, oldest, end, zeros, held)
    while first < end:
        held_from, held_to = max(oldest - first, 0), min(end - first, KEY_BLOCK)
        whole = _rounded_up(held_to, COLUMNS)
        keys, values = held[0], held[1]
        after_pages, after_head, after_first, after_oldest, after_end = pages, head, first + KEY_BLOCK, oldest, end
        if first + KEY_BLOCK >= end:
            after_pages, after_head, after_oldest, after_end = after
            after_first = after_oldest // KEY_BLOCK * KEY_BLOCK
        find_rows(pool, layer, after_pages, after_head, after_first, after_oldest, after_end, zeros, ahead)
        begun, even, done = held_from // COLUMNS * COLUMNS, held_from // 2 * 2, _rounded_up(held_to, 2)
        if few:
            line_up(keys, begun, whole, order)
            line_up(values, even, done, order[whole - begun :])
            next_begun = min(max(after_oldest - after_first, 0), KEY_BLOCK - DISTANCE)
            line_up(ahead[0], next_begun, next_begun + DISTANCE, order[whole - begun + done - even :])
        copy_rows(kind, pool, layer, pages, 0, head, first, held_from, held_to, block, keys)
        if few:
            to, fetched = scores.ctypes.data, order.ctypes.data + 8 * (DISTANCE - begun)
            few_scores(
                factor, kind, keys.ctypes.data, begun, whole, size * wide, x.ctypes.data, rows, to, 4 * KEY_BLOCK,
                fetched,
            )  # fmt: skip
        else:
            pack_keys(keys, whole, size * wide, packed, values)
            for column in range(0, whole, COLUMNS):
                w = packed + size * wide * column
                _multiply(factor, kind, x, wide, w, scores[:, column:].ctypes.data, 4 * KEY_BLOCK)
        for i in range(rows):
            at = position + i // group
            stop = max(min(at + 1 - first, KEY_BLOCK), 0)
            start = max(at - window + 1 - first, 0)
            if start >= stop:
                weights[i] = 0
                states[i, 2] = np.float32(1)
                continue
            factor = scale
            if softcap > 0:
                _cap(scores[i], scale, softcap)
                factor = np.float32(1)
            to = weights[i].ctypes.data
            soften(factor, kind, scores[i].ctypes.data, to, states[i].ctypes.data, factor, start, stop)
        copy_rows(kind, pool, layer, pages, 1, head, first, held_from, held_to, block, values)
        if few:
            to, fetched = added.ctypes.data, order.ctypes.data + 8 * (whole - begun + DISTANCE - even)
            few_sums(
                factor, kind, values.ctypes.data, even, done, size * wide, weights.ctypes.data,
                item_bytes(factor) * KEY_BLOCK, rows, to, 4 * wide, fetched,
            )  # fmt: skip
        else:
            pack_values(kind, values, whole, size * wide, packed, ahead[0])
            for g in range(wide // COLUMNS):
                w = packed + g * COLUMNS * KEY_BLOCK * size
                _multiply(factor, kind, weights, whole, w, added[:, g * COLUMNS :].ctypes.data, 4 * wide)
        for i in range(rows):
            renew(sums[i].ctypes.data, states[i, 2], added[i].ctypes.data, 4 * wide)
        held, ahead = ahead, held
        first += KEY_BLOCK
    for i in range(rows):
        t, h = i // group, head * group + i % group
        for d in range(dim):
            store_as(q[begin + t, h, d], out, (begin + t, h, d), sums[i, d] / states[i, 1])


@njit(**OPTIONS)
def _multiply(factor, kind, x, inner, w, out, out_stride):
    """`x[:, :inner]` times a packed matrix [inner, 32] at address `w`; to address `out`."""
    row, stride = 0, x.shape[1] * item_bytes(factor)
    steps = inner * item_bytes(kind) // STEP_BYTES
    while row < x.shape[0]:
        to = out + row * out_stride
        row += multiply_rows(factor, kind, x.ctypes.data, stride, w, steps, to, out_stride, row, x.shape[0], w)


@njit(**OPTIONS)
def _cap(row, scale, softcap):
    """softcap * tanh(x * scale / softcap), by exp(-2 |x|)."""
    for j in range(KEY_BLOCK):
        x = row[j] * scale / softcap
        e = exp(np.float32(-2) * abs(x))
        y = (np.float32(1) - e) / (np.float32(1) + e) * softcap
        row[j] = y if x >= 0 else -y


@njit(**OPTIONS)
def _plan_items(frame, threads):
    """[items, then row, first query, queries, position for each block of queries]; clears the padding."""
    (_, shape), rows = argument(frame, 0), argument(frame, 3)[1][0]
    contexts = carray(pointer_i32(argument(frame, 4)[0]), (rows,))
    starts = carray(pointer_i32(argument(frame, 5)[0]), (rows + 1,))
    out = carray(pointer_u16(result(frame, 0)), (shape[0], result_bytes(frame, 0) // (2 * max(shape[0], 1))))
    blocks = 0
    for r in range(rows):
        blocks += (starts[r + 1] - starts[r] + QUERY_BLOCK - 1) // QUERY_BLOCK
    plan = np.zeros(1 + 4 * blocks, np.int64)
    n = 0
    for r in range(rows):
        count = starts[r + 1] - starts[r]
        if contexts[r] <= 0:
            out[starts[r] : starts[r + 1]] = 0
            continue
        # The last queries of a row, which see most, are begun first.
        done = (count - 1) // QUERY_BLOCK * QUERY_BLOCK
        while done >= 0 and count > 0:
            plan[1 + 4 * n], plan[2 + 4 * n] = r, starts[r] + done
            plan[3 + 4 * n] = min(QUERY_BLOCK, count - done)
            plan[4 + 4 * n] = contexts[r] - count + done
            n += 1
            done -= QUERY_BLOCK
    out[starts[rows] :] = 0
    plan[0] = n * argument(frame, 1)[1][3]
    return plan


@njit(**OPTIONS)
def _run_item(kind, frame, plan, item, q, pool, out):
    layer = carray(pointer_i32(argument(frame, 2)[0]), (1,))[0]
    address, shape = argument(frame, 3)
    table = carray(pointer_i32(address), (shape[0], shape[1]))
    options = carray(pointer_f32(argument(frame, 6)[0]), (3,))
    address, shape = argument(frame, 7)
    sinks = carray(pointer_f32(address), (shape[0],))
    block, head = item // pool.shape[3], item % pool.shape[3]
    row, begin, count, position = words(plan + 8 * (1 + 4 * block), 4)
    pages = table[row]
    scratch = np.empty(scratch_words(kind, count * (q.shape[1] // pool.shape[3]), q.shape[2]), np.int64)
    queries, nothing = (pages, head, begin, count, position), (pages, head, position + count, position + count)
    choices = (options[0], np.int64(options[1]), options[2])
    attend(kind, q, pool, layer, queries, choices, sinks, out, aligned(scratch.ctypes.data), nothing)
    scratch[0] = 0  # it lives until here


def _compiled_parts(version: int, dtype: str, pool_dtype: str) -> tuple[Any, Any]:
    """`plan_items` and `run_item`, as `register` takes them; `version` is in the key under which their code is kept."""
    kind, pool_kind, work = KINDS[dtype], KINDS[pool_dtype], work_kind(dtype, pool_dtype)

    @njit(**KEPT)
    def plan_items(frame, threads):
        _ = version
        return _plan_items(frame, threads)

    @njit(**KEPT)
    def run_item(frame, plan, item):
        _ = version
        address, shape = argument(frame, 0)
        tokens = (shape[0], shape[1], shape[2])
        q, out = array_at(kind, address, tokens), array_at(kind, result(frame, 0), tokens)
        address, shape = argument(frame, 1)
        pool = array_at(pool_kind, address, (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]))
        _run_item(work, frame, plan, item, q, pool, out)

    return plan_items, run_item


def work_kind(dtype: str, pool_dtype: str) -> Any:
    """What queries of a dtype and a pool of another are multiplied as, see `KINDS`."""
    return KINDS[dtype if dtype == pool_dtype else "float32"]


@functools.cache
def _call_name(dtype: str, pool_dtype: str) -> str:
    """The custom call for queries and pool of these types; compiled when first asked for."""
    name = f"pallas_kernels.paged_attention.{dtype}.{pool_dtype}"
    register(name, *_compiled_parts(source_version(__file__, *SOURCES), dtype, pool_dtype))
    return name


def paged_attention_native_cpu(
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
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.paged_attention.api.paged_attention`; `interpret` means nothing here."""
    if {q.dtype.name, pool.dtype.name} - set(NATIVE_DTYPES) or pool.shape[2] != 2 or pool.shape[5] != q.shape[2]:
        raise NotImplementedError(
            f"native_cpu takes queries and a plain pool [L, P, 2, K, S, D] of {' or '.join(NATIVE_DTYPES)}; these are"
            f" {q.dtype} and {pool.dtype}{list(pool.shape)}: implementation 'cpu' takes every pool"
        )
    if query_starts is None:
        query_starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    options = jnp.asarray([scale, sliding_window or 2**30, logit_softcap or 0], jnp.float32)
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    return jax.ffi.ffi_call(_call_name(q.dtype.name, pool.dtype.name), jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q, pool, *(x.astype(jnp.int32) for x in (layer, page_table, context_lens, query_starts)), options, sinks
    )
