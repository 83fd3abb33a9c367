"""Paged attention for CPUs, compiled by numba and called by XLA.

XLA's CPU backend runs the loops of `cpu` as dozens of small operations per block of keys. Here a layer's attention is
one call: items (a row's queries, up to `QUERY_BLOCK` of them, and a KV head) are shared among XLA's threads, and each
streams its pages through a softmax that is renormalised as it goes (Milakov and Gimelshein 2018), block by block.

A query's result has the same bits whatever is computed beside it, chunked or not: blocks of keys are aligned to the
sequence, products are taken in groups of four keys aligned to the page, and what a query does not see counts zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from pallas_kernels.common.cpu_calls import (
    INLINE,
    OPTIONS,
    argument,
    bits_to_float,
    load,
    pointer_f32,
    pointer_i32,
    pointer_u16,
    prefetch,
    register,
    result,
    result_bytes,
    store,
    words,
)
from pallas_kernels.common.native import NATIVE_DTYPES

KEY_BLOCK = 128
"""Keys whose scores are held at once."""

QUERY_BLOCK = 32
"""Query tokens of an item."""

_NEVER = np.float32(-1e30)


@njit(**INLINE)
def _exp(x: float) -> float:
    """exp(x) of x <= 0 to 1e-7; 0 below -87. After Cephes' expf."""
    low = x < np.float32(-87.0)
    if low:
        x = np.float32(-87.0)
    n = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))
    f = x - np.float32(n) * np.float32(0.693359375) + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    power = bits_to_float(np.uint32((n + np.int32(127)) << np.int32(23)))
    return np.float32(0) if low else p * power


@njit(fastmath=True, error_model="numpy", boundscheck=False, cache=True)
def _top(row):
    """Largest of KEY_BLOCK numbers."""
    top = row[0]
    for j in range(KEY_BLOCK):
        top = max(top, row[j])
    return top


@njit(**OPTIONS)
def _exponentials(row, top):
    """Makes x exp(x - top) in a row of KEY_BLOCK; returns the sum."""
    total = np.float32(0)
    for j in range(KEY_BLOCK):
        e = _exp(row[j] - top)
        row[j] = e
        total += e
    return total


@njit(**OPTIONS)
def score_keys(q, q0, k, count, out):
    """out[q0 + i, j] = q[q0 + i] . k[j] for four queries and the first `count` keys, rounded up to fours."""
    j = 0
    while j < count:
        a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = np.float32(0)
        a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = np.float32(0)
        for d in range(q.shape[1]):
            k0, k1, k2, k3 = k[j, d], k[j + 1, d], k[j + 2, d], k[j + 3, d]
            x = q[q0, d]
            a00 += x * k0
            a01 += x * k1
            a02 += x * k2
            a03 += x * k3
            x = q[q0 + 1, d]
            a10 += x * k0
            a11 += x * k1
            a12 += x * k2
            a13 += x * k3
            x = q[q0 + 2, d]
            a20 += x * k0
            a21 += x * k1
            a22 += x * k2
            a23 += x * k3
            x = q[q0 + 3, d]
            a30 += x * k0
            a31 += x * k1
            a32 += x * k2
            a33 += x * k3
        out[q0, j], out[q0, j + 1], out[q0, j + 2], out[q0, j + 3] = a00, a01, a02, a03
        out[q0 + 1, j], out[q0 + 1, j + 1], out[q0 + 1, j + 2], out[q0 + 1, j + 3] = a10, a11, a12, a13
        out[q0 + 2, j], out[q0 + 2, j + 1], out[q0 + 2, j + 2], out[q0 + 2, j + 3] = a20, a21, a22, a23
        out[q0 + 3, j], out[q0 + 3, j + 1], out[q0 + 3, j + 2], out[q0 + 3, j + 3] = a30, a31, a32, a33
        j += 4


@njit(**OPTIONS)
def add_values(p, q0, v, count, sums):
    """sums[q0 + i] += p[q0 + i, j] * v[j] for four queries and the first `count` values, rounded up to fours."""
    j = 0
    while j < count:
        p00, p01, p02, p03 = p[q0, j], p[q0, j + 1], p[q0, j + 2], p[q0, j + 3]
        p10, p11, p12, p13 = p[q0 + 1, j], p[q0 + 1, j + 1], p[q0 + 1, j + 2], p[q0 + 1, j + 3]
        p20, p21, p22, p23 = p[q0 + 2, j], p[q0 + 2, j + 1], p[q0 + 2, j + 2], p[q0 + 2, j + 3]
        p30, p31, p32, p33 = p[q0 + 3, j], p[q0 + 3, j + 1], p[q0 + 3, j + 2], p[q0 + 3, j + 3]
        for d in range(sums.shape[1]):
            v0, v1, v2, v3 = v[j, d], v[j + 1, d], v[j + 2, d], v[j + 3, d]
            sums[q0, d] += p00 * v0 + p01 * v1 + p02 * v2 + p03 * v3
            sums[q0 + 1, d] += p10 * v0 + p11 * v1 + p12 * v2 + p13 * v3
            sums[q0 + 2, d] += p20 * v0 + p21 * v1 + p22 * v2 + p23 * v3
            sums[q0 + 3, d] += p30 * v0 + p31 * v1 + p32 * v2 + p33 * v3
        j += 4


@njit(**OPTIONS)
def _copy(source, target):
    for i in range(target.shape[0]):
        target[i] = load(source[i])


@njit(**OPTIONS)
def _read_block(pool, layer, pages, part, head, first, start, stop, block):
    """Tokens [start, stop) of a block that begins at token `first`, as float32; zeros for the others."""
    page_size = pool.shape[4]
    for j in range(start):
        for d in range(block.shape[1]):
            block[j, d] = np.float32(0)
    j = start
    while j < stop:
        page, slot = (first + j) // page_size, (first + j) % page_size
        source = pool[layer, pages[page], part, head]
        count = min(page_size - slot, stop - j)
        _copy(source[slot : slot + count].reshape(-1), block[j : j + count].reshape(-1))
        j += count
    for j in range(stop, KEY_BLOCK):
        for d in range(block.shape[1]):
            block[j, d] = np.float32(0)


@njit(**OPTIONS)
def _fetch_block(pool, layer, pages, part, head, first, end):
    """Asks for the pages of tokens [first, end), which memory gives while another block is computed."""
    page_size = pool.shape[4]
    for page in range(first // page_size, (end + page_size - 1) // page_size):
        piece = pool[layer, pages[page], part, head]
        for line in range(0, piece.nbytes, 64):
            prefetch(piece.ctypes.data + line)


@njit(**OPTIONS)
def _attend(q, pool, layer, pages, head, begin, count, position, scale, window, softcap, sinks, out):
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
    _fetch_block(pool, layer, pages, 0, head, max(position - window + 1, 0), min(end, KEY_BLOCK))
    first = max(position - window + 1, 0) // KEY_BLOCK * KEY_BLOCK
    while first < end:
        held_from = max(position - window + 1 - first, 0)
        held_to = min(end - first, KEY_BLOCK)
        _fetch_block(pool, layer, pages, 1, head, first + held_from, first + held_to)
        _read_block(pool, layer, pages, 0, head, first, held_from, held_to, block)
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
                    e = _exp(np.float32(-2) * abs(x))
                    y = (np.float32(1) - e) / (np.float32(1) + e) * softcap
                    row[j] = y if x >= 0 else -y
            for j in range(start):
                row[j] = _NEVER
            for j in range(stop, KEY_BLOCK):
                row[j] = _NEVER
            top = max(_top(row), tops[i])
            keep = _exp(tops[i] - top)
            tops[i], totals[i] = top, totals[i] * keep + _exponentials(row, top)
            for d in range(dim):
                sums[i, d] *= keep
        _fetch_block(pool, layer, pages, 0, head, first + KEY_BLOCK, min(end, first + 2 * KEY_BLOCK))
        _read_block(pool, layer, pages, 1, head, first, held_from, held_to, block)
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
    _attend(
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


@njit(**OPTIONS)
def _float32_float32(frame, plan, item):
    q, shape = argument(frame, 0)
    pool, pages = argument(frame, 1)
    tokens = (shape[0], shape[1], shape[2])
    _run_item(
        frame,
        plan,
        item,
        carray(pointer_f32(q), tokens),
        carray(pointer_f32(pool), (pages[0], pages[1], pages[2], pages[3], pages[4], pages[5])),
        carray(pointer_f32(result(frame, 0)), tokens),
    )


@njit(**OPTIONS)
def _float32_bfloat16(frame, plan, item):
    q, shape = argument(frame, 0)
    pool, pages = argument(frame, 1)
    tokens = (shape[0], shape[1], shape[2])
    _run_item(
        frame,
        plan,
        item,
        carray(pointer_f32(q), tokens),
        carray(pointer_u16(pool), (pages[0], pages[1], pages[2], pages[3], pages[4], pages[5])),
        carray(pointer_f32(result(frame, 0)), tokens),
    )


@njit(**OPTIONS)
def _bfloat16_float32(frame, plan, item):
    q, shape = argument(frame, 0)
    pool, pages = argument(frame, 1)
    tokens = (shape[0], shape[1], shape[2])
    _run_item(
        frame,
        plan,
        item,
        carray(pointer_u16(q), tokens),
        carray(pointer_f32(pool), (pages[0], pages[1], pages[2], pages[3], pages[4], pages[5])),
        carray(pointer_u16(result(frame, 0)), tokens),
    )


@njit(**OPTIONS)
def _bfloat16_bfloat16(frame, plan, item):
    q, shape = argument(frame, 0)
    pool, pages = argument(frame, 1)
    tokens = (shape[0], shape[1], shape[2])
    _run_item(
        frame,
        plan,
        item,
        carray(pointer_u16(q), tokens),
        carray(pointer_u16(pool), (pages[0], pages[1], pages[2], pages[3], pages[4], pages[5])),
        carray(pointer_u16(result(frame, 0)), tokens),
    )


_CALLS = {
    ("float32", "float32"): _float32_float32,
    ("float32", "bfloat16"): _float32_bfloat16,
    ("bfloat16", "float32"): _bfloat16_float32,
    ("bfloat16", "bfloat16"): _bfloat16_bfloat16,
}


def _call_name(dtype: str, pool_dtype: str) -> str:
    """The custom call for queries and pool of these types; compiled when first asked for."""
    name = f"pallas_kernels.paged_attention.{dtype}.{pool_dtype}"
    register(name, _plan_items, _CALLS[dtype, pool_dtype])
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
        q, pool, layer, page_table, context_lens, query_starts, options, sinks
    )
