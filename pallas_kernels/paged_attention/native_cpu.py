"""Paged attention for CPUs, compiled by numba and called by XLA.

XLA's CPU backend runs the loops of `cpu` as dozens of small operations per block of keys. Here a layer's attention is
one call: items (a row's queries, up to `QUERY_BLOCK` of them, and a KV head) are shared among XLA's threads, and each
streams its pages through a softmax that is renormalised as it goes (Milakov and Gimelshein 2018), block by block.

A query's result has the same bits whatever is computed beside it, chunked or not: blocks of keys are aligned to the
sequence, products are taken in groups of four keys, and what a query does not see of its own request's keys and values,
which are finite, counts zero. Anything else in the pool is not read.
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
    load,
    pointer_f32,
    pointer_i32,
    pointer_u16,
    store,
)
from pallas_kernels.common.native import NATIVE_DTYPES
from pallas_kernels.paged_attention import native_cpu_block
from pallas_kernels.paged_attention.native_cpu_block import (
    KEY_BLOCK,
    add_values,
    exp,
    exponentials,
    fetch_block,
    largest,
    read_block,
    score_keys,
)

QUERY_BLOCK = 32
"""Query tokens of an item."""

_NEVER = np.float32(-1e30)


@njit(**OPTIONS)
def attend(q, pool, layer, pages, head, begin, count, position, scale, window, softcap, sinks, out):
    """Queries [begin, begin + count) of one row, the first at `position`, over KV head `head`."""
    dim = q.shape[2]
    group = q.shape[1] // pool.shape[3]
    rows = count * group
    tiles = (rows + 3) // 4
    queries = np.zeros((4 * tiles, dim), np.float32)
    sums = np.zeros((4 * tiles, dim), np.float32)
    scores = np.empty((4 * tiles, KEY_BLOCK), np.float32)
    block = np.empty((KEY_BLOCK, dim), np.float32)
    tops = np.full(4 * tiles, _NEVER, np.float32)
    totals = np.zeros(4 * tiles, np.float32)
    for i in range(rows):
        t, h = i // group, head * group + i % group
        for d in range(dim):
            queries[i, d] = load(q[begin + t, h, d]) * scale
        if sinks.shape[0] and sinks[h] > _NEVER:
            tops[i], totals[i] = sinks[h], np.float32(1)
    end = position + count
    first = max(position - window + 1, 0) // KEY_BLOCK * KEY_BLOCK
    fetch_block(pool, layer, pages, 0, head, max(position - window + 1, 0), min(end, first + KEY_BLOCK))
    while first < end:
        held_from = max(position - window + 1 - first, 0)
        held_to = min(end - first, KEY_BLOCK)
        fetch_block(pool, layer, pages, 1, head, first + held_from, first + held_to)
        read_block(pool, layer, pages, 0, head, first, held_from, held_to, block)
        for tile in range(tiles):
            newest = position + min((4 * tile + 3) // group, count - 1)
            score_keys(queries, 4 * tile, block, min(newest + 1 - first, KEY_BLOCK), scores)
        for i in range(4 * tiles):
            at = position + i // group
            stop = max(min(at + 1 - first, KEY_BLOCK), 0)
            start = max(at - window + 1 - first, 0)
            row = scores[i]
            if i >= rows or start >= stop:
                for j in range(KEY_BLOCK):
                    row[j] = np.float32(0)
                continue
            if softcap > 0:
                for j in range(start, stop):
                    # tanh by exp(-2 |x|)
                    x = row[j] / softcap
                    e = exp(np.float32(-2) * abs(x))
                    y = (np.float32(1) - e) / (np.float32(1) + e) * softcap
                    row[j] = y if x >= 0 else -y
            for j in range(start):
                row[j] = _NEVER
            for j in range(stop, KEY_BLOCK):
                row[j] = _NEVER
            top = max(largest(row), tops[i])
            keep = exp(tops[i] - top)
            tops[i], totals[i] = top, totals[i] * keep + exponentials(row, top)
            for d in range(dim):
                sums[i, d] *= keep
        fetch_block(pool, layer, pages, 0, head, first + KEY_BLOCK, min(end, first + 2 * KEY_BLOCK))
        read_block(pool, layer, pages, 1, head, first, held_from, held_to, block)
        for tile in range(tiles):
            newest = position + min((4 * tile + 3) // group, count - 1)
            add_values(scores, 4 * tile, block, min(newest + 1 - first, KEY_BLOCK), sums)
        first += KEY_BLOCK
    for i in range(rows):
        t, h = i // group, head * group + i % group
        for d in range(dim):
            store(out, (begin + t, h, d), sums[i, d] / totals[i])


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
def _run_item(frame, plan, item, q, pool, out):
    layer = carray(pointer_i32(argument(frame, 2)[0]), (1,))[0]
    address, shape = argument(frame, 3)
    table = carray(pointer_i32(address), (shape[0], shape[1]))
    options = carray(pointer_f32(argument(frame, 6)[0]), (3,))
    address, shape = argument(frame, 7)
    sinks = carray(pointer_f32(address), (shape[0],))
    block, head = item // pool.shape[3], item % pool.shape[3]
    row, begin, count, position = words(plan + 8 * (1 + 4 * block), 4)
    attend(
        q,
        pool,
        layer,
        table[row],
        head,
        begin,
        count,
        position,
        options[0],
        np.int64(options[1]),
        options[2],
        sinks,
        out,
    )


def _compiled_parts(version: int, dtype: str, pool_dtype: str) -> tuple[Any, Any]:
    """`plan_items` and `run_item`, as `register` takes them; `version` is in the key under which their code is kept."""
    kind, pool_kind = KINDS[dtype], KINDS[pool_dtype]

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
        _run_item(frame, plan, item, q, pool, out)

    return plan_items, run_item


@functools.cache
def _call_name(dtype: str, pool_dtype: str) -> str:
    """The custom call for queries and pool of these types; compiled when first asked for."""
    name = f"pallas_kernels.paged_attention.{dtype}.{pool_dtype}"
    register(name, *_compiled_parts(source_version(__file__, native_cpu_block.__file__), dtype, pool_dtype))
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
