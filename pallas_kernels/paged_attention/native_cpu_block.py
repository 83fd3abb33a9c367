"""What `native_cpu` does with a block of keys or values, all in the nearest caches.

Keys and values of a block are packed as matrices for products are (`pallas_kernels.matmul`), and multiplied by the
same tiles: scores are queries times keys as columns, sums are weights times values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.common.cpu_values import (
    INLINE,
    LINE,
    OPTIONS,
    array_at,
    bits_to_float,
    item_bytes,
    load,
    prefetch,
    store,
)
from pallas_kernels.matmul.tile import COLUMNS

KEY_BLOCK = 128
"""Keys whose scores are held at once."""
TURN_STRIDE = 4 * COLUMNS
PIECE = 2048
"""Bytes that are fetched at once, at most."""
AHEAD_WORDS = 4 + 96
FETCHES = 12
"""Calls of `fetch`, at least, while a whole block is computed."""


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
def _largest(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = 16
        vector = ir.VectorType(ir.FloatType(), lanes)
        top = None
        for offset in range(0, KEY_BLOCK, lanes):
            place = builder.add(args[0], ir.Constant(ir.IntType(64), 4 * offset))
            x = builder.load(builder.inttoptr(place, vector.as_pointer()), align=4)
            top = x if top is None else builder.select(builder.fcmp_ordered(">", x, top), x, top)
        kind = ir.FunctionType(ir.FloatType(), [vector])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmax.v16f32")
        return builder.call(reduce, [top])

    return types.float32(types.int64), generate


@njit(**OPTIONS)
def largest(row):
    """Largest of KEY_BLOCK numbers."""
    return _largest(row.ctypes.data)


@njit(**OPTIONS)
def exponentials(row, top):
    """Makes x exp(x - top) in a row of KEY_BLOCK; returns the sum."""
    total = np.float32(0)
    for j in range(KEY_BLOCK):
        e = exp(row[j] - top)
        row[j] = e
        total += e
    return total


@njit(**OPTIONS)
def find_rows(kind, pool, layer, pages, part, head, first, start, stop, end, block, rows):
    """Addresses of the keys or values of a block that begins at token `first`, as `kind`, D rounded up to 32s.

    Those of tokens [start, stop); for the others before `end` the address of zeros. They lie in the pool, or where that
    is another type or D no multiple of 32, in `block` [KEY_BLOCK + 1, D rounded up].
    """
    page_size, dim = pool.shape[4], pool.shape[5]
    row_bytes, zeros = block.shape[1] * item_bytes(kind), block[KEY_BLOCK].ctypes.data
    is_as_stored = item_bytes(kind) == pool.itemsize and dim == block.shape[1]
    rows[:start] = zeros
    rows[stop:end] = zeros
    j = start
    while j < stop:
        page, slot = (first + j) // page_size, (first + j) % page_size
        source = pool[layer, pages[page], part, head]
        count = min(page_size - slot, stop - j)
        if is_as_stored:
            address = source[slot].ctypes.data
            for i in range(count):
                rows[j + i] = address + i * row_bytes
        else:
            for i in range(count):
                for d in range(dim):
                    store(block, (j + i, d), load(source[slot + i, d]))
                block[j + i, dim:] = 0
                rows[j + i] = block[j + i].ctypes.data
        j += count


@intrinsic
def _turn(typing: Any, rows: Any, offset: Any, target: Any) -> Any:
    """Transposes 16 by 16 words of 32 bits, at `offset` bytes of the 16 addresses at `rows`.

    Rows of the target are `TURN_STRIDE` bytes apart.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses, offset, target = args
        size, word = 16, ir.IntType(64)
        vector = ir.VectorType(ir.IntType(32), size)
        rows = []
        for row in range(size):
            place = builder.add(addresses, ir.Constant(word, 8 * row))
            start = builder.add(builder.load(builder.inttoptr(place, word.as_pointer())), offset)
            rows.append(builder.load(builder.inttoptr(start, vector.as_pointer()), align=2))
        for step in (1, 2, 4, 8):  # swaps the blocks off the diagonal, of ever larger blocks
            for row in range(size):
                if row & step == 0:
                    one, two = rows[row], rows[row + step]
                    upper = [c if c & step == 0 else size + c - step for c in range(size)]
                    lower = [c + step if c & step == 0 else size + c for c in range(size)]
                    rows[row] = builder.shuffle_vector(one, two, ir.Constant(vector, upper))
                    rows[row + step] = builder.shuffle_vector(one, two, ir.Constant(vector, lower))
        for row in range(size):
            place = builder.add(target, ir.Constant(word, row * TURN_STRIDE))
            builder.store(rows[row], builder.inttoptr(place, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate


@njit(**OPTIONS)
def pack_keys(rows, end, row_bytes, packed, ahead):
    """Keys at addresses rows[:end] as the columns of packed matrices [D, 32], at address `packed`; `end` in 32s."""
    address = rows.ctypes.data
    for first in range(0, end, 16):
        if first % 32 == 0:
            fetch(ahead)
        to = packed + first // COLUMNS * COLUMNS * row_bytes + first % COLUMNS * 4
        for byte in range(0, row_bytes, 64):
            _turn(address + 8 * first, byte, to + 32 * byte)


@intrinsic
def _pair(typing: Any, one: Any, two: Any, target: Any) -> Any:
    """Puts 32 numbers of 16 bits at `one` and as many at `two` side by side, one and one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), COLUMNS)
        order = [place for c in range(COLUMNS) for place in (c, COLUMNS + c)]
        one, two = (builder.load(builder.inttoptr(x, vector.as_pointer()), align=2) for x in args[:2])
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
        fetch(ahead)
        if size == 2:
            for j in range(0, end, 2):
                _pair(rows[j] + first, rows[j + 1] + first, target + j * COLUMNS * size)
        else:
            for j in range(end):
                numbers = array_at(np.float32(0), target + j * COLUMNS * size, (COLUMNS,))
                numbers[:] = array_at(np.float32(0), rows[j] + first, (COLUMNS,))


@njit(**OPTIONS)
def plan_fetch(pool, layer, pages, head, oldest, first, end, ahead):
    """Makes `ahead` the list of what the block that begins at token `first` holds of tokens [oldest, end).

    `ahead` is int64[AHEAD_WORDS]: pieces fetched, pieces there are, their bytes, pieces at a time, their addresses.
    """
    page_size = pool.shape[4]
    stop = min(end, first + KEY_BLOCK)
    count, start = 0, max(oldest, first)
    page_bytes = pool[0, 0, 0, 0].nbytes
    size = min(page_bytes, PIECE)
    for part in range(2):
        for page in range(start // page_size, (stop + page_size - 1) // page_size):
            address = pool[layer, pages[page], part, head].ctypes.data
            for byte in range(0, page_bytes, size):
                if count < AHEAD_WORDS - 4:
                    ahead[4 + count] = address + byte
                    count += 1
    ahead[0], ahead[1], ahead[2], ahead[3] = 0, count, size, (count + FETCHES - 1) // FETCHES


@njit(**OPTIONS)
def fetch(ahead):
    """Asks for the next pieces of a list, which memory gives while something else is computed."""
    first = ahead[0]
    end = min(first + ahead[3], ahead[1])
    for piece in range(first, end):
        for line in range(0, ahead[2], LINE):
            prefetch(ahead[4 + piece] + line)
    ahead[0] = end
