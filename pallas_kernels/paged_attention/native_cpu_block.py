"""What `native_cpu` does with a block of keys or values, all in the nearest caches.

Keys and values of a block are packed as matrices for products are (`pallas_kernels.matmul`), and multiplied by the
same tiles: scores are queries times keys as columns, sums are weights times values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pallas_kernels.common.cpu_values import (
    INLINE,
    LINE,
    OPTIONS,
    bits_to_float,
    item_bytes,
    prefetch,
    store,
)
from pallas_kernels.common.cpu_values import load as as_float
from pallas_kernels.matmul.tile import COLUMNS, INTS, Loop, load, spread, word
from pallas_kernels.paged_attention.native_cpu_few import fetch_line, turn
from pallas_kernels.paged_attention.native_cpu_softmax import KEY_BLOCK

TURN_STRIDE = 4 * COLUMNS
ADDRESSES = 8
"""Addresses that are written at once."""
DISTANCE = 32
"""Keys or values ahead of those at hand that memory is asked for."""
ORDER = 2 * KEY_BLOCK + DISTANCE + 16
"""Addresses of keys, values and what follows, in the order in which they are read, and space to write beyond."""


@njit(**INLINE)
def exp(x: float) -> float:
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


@intrinsic
def _count_up(typing: Any, target: Any, first: Any, step: Any, count: Any) -> Any:
    """Writes first, first + step and so on as int64 to an address: `count`, one at least, up to a whole vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, first, step, count = args
        kind = ir.VectorType(word(0).type, ADDRESSES)
        lanes = builder.mul(spread(builder, step, ADDRESSES), ir.Constant(kind, list(range(ADDRESSES))))
        start = builder.add(spread(builder, first, ADDRESSES), lanes)
        more = spread(builder, builder.mul(step, word(ADDRESSES)), ADDRESSES)
        loop = Loop(builder, word(0), count, ADDRESSES, [start])
        place = builder.add(target, builder.mul(loop.index, word(8)))
        builder.store(loop.values[0], builder.inttoptr(place, kind.as_pointer()), align=8)
        loop.end([builder.add(loop.values[0], more)])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


@njit(**OPTIONS)
def find_rows(pool, layer, pages, head, first, oldest, end, zeros, rows):
    """Addresses of the keys and the values of a block that begins at token `first`.

    Args:
      oldest, end: the tokens that are held; for the others, and if `first` is beyond, there is the address of zeros.
      rows: int64[2, KEY_BLOCK + ADDRESSES]; what is beyond KEY_BLOCK is scratch.
    """
    page_size, row_bytes = pool.shape[4], pool.shape[5] * pool.itemsize
    apart = pool.shape[3] * page_size * row_bytes
    start, stop = min(max(oldest - first, 0), KEY_BLOCK), max(min(end - first, KEY_BLOCK), 0)
    keys, values = rows[0].ctypes.data, rows[1].ctypes.data
    if start:
        _count_up(keys, zeros, 0, start)
        _count_up(values, zeros, 0, start)
    j, page, slot = start, (first + start) // page_size, (first + start) % page_size
    while j < stop:
        address = pool[layer, pages[page], 0, head, slot].ctypes.data
        count = min(page_size - slot, stop - j)
        _count_up(keys + 8 * j, address, row_bytes, count)
        _count_up(values + 8 * j, address + apart, row_bytes, count)
        j, page, slot = j + count, page + 1, 0
    if stop < KEY_BLOCK:
        _count_up(keys + 8 * stop, zeros, 0, KEY_BLOCK - stop)
        _count_up(values + 8 * stop, zeros, 0, KEY_BLOCK - stop)


@intrinsic
def _copy(typing: Any, source: Any, target: Any) -> Any:
    """Copies 128 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), COLUMNS)
        numbers = load(builder, args[0], vector)
        builder.store(numbers, builder.inttoptr(args[1], vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 2), generate


@njit(**OPTIONS)
def line_up(rows, first, end, order):
    """Copies addresses rows[first:end] to the beginning of `order`, and up to 15 more."""
    for j in range(0, end - first, 16):
        _copy(rows.ctypes.data + 8 * (first + j), order.ctypes.data + 8 * j)


@njit(**OPTIONS)
def copy_rows(kind, pool, layer, pages, part, head, first, start, stop, block, rows):
    """Where tokens are not stored as `kind`, or have no multiple of 32 dimensions: puts [start, stop) into a block.

    Args:
      block: [KEY_BLOCK + 1, D rounded up].
      rows: addresses in the pool, which become those in the block.
    """
    page_size, dim = pool.shape[4], pool.shape[5]
    if item_bytes(kind) == pool.itemsize and dim == block.shape[1]:
        return
    for j in range(start, stop):
        page, slot = (first + j) // page_size, (first + j) % page_size
        row = pool[layer, pages[page], part, head, slot]
        for d in range(dim):
            store(block, (j, d), as_float(row[d]))
        block[j, dim:] = 0
        rows[j] = block[j].ctypes.data


@intrinsic
def _turn(typing: Any, rows: Any, offset: Any, target: Any, ahead: Any) -> Any:
    """Transposes 16 by 16 words of 32 bits, at `offset` bytes of the 16 addresses at `rows`.

    Rows of the target are `TURN_STRIDE` bytes apart.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses, offset, target, ahead = args
        for row, words in enumerate(turn(builder, addresses, offset)):
            fetch_line(builder, ahead, row, offset)
            place = builder.add(target, word(row * TURN_STRIDE))
            builder.store(words, builder.inttoptr(place, INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


@njit(**OPTIONS)
def pack_keys(rows, end, row_bytes, packed, ahead):
    """Keys at addresses rows[:end] as the columns of packed matrices [D, 32], at address `packed`; `end` in 32s."""
    address = rows.ctypes.data
    for first in range(0, end, 16):
        to = packed + first // COLUMNS * COLUMNS * row_bytes + first % COLUMNS * 4
        for byte in range(0, row_bytes, LINE):
            _turn(address + 8 * first, byte, to + COLUMNS * byte, ahead.ctypes.data + 8 * first)


@intrinsic
def _pair(typing: Any, one: Any, two: Any, target: Any) -> Any:
    """Puts 32 numbers of 16 bits at `one` and as many at `two` side by side, one and one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), COLUMNS)
        order = [place for c in range(COLUMNS) for place in (c, COLUMNS + c)]
        one, two = (load(builder, x, vector) for x in args[:2])
        both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(ir.IntType(32), 2 * COLUMNS), order))
        builder.store(both, builder.inttoptr(args[2], both.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate


@njit(**OPTIONS)
def pack_values(kind, rows, end, row_bytes, packed, ahead):
    """Values at addresses rows[:end] as packed matrices [end, 32], one after the other, of 32 dimensions each.

    `packed` is the address of [D / 32, KEY_BLOCK / p, 32, p].
    """
    size = item_bytes(kind)
    for first in range(0, row_bytes, COLUMNS * size):
        target = packed + first * KEY_BLOCK
        for j in range(end):
            for byte in range(first, first + COLUMNS * size, LINE):
                prefetch(ahead[j] + byte)
        if size == 2:
            for j in range(0, end, 2):
                _pair(rows[j] + first, rows[j + 1] + first, target + j * COLUMNS * size)
        else:
            for j in range(end):
                _copy(rows[j] + first, target + j * COLUMNS * size)
