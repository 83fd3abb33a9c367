"""Products with packed matrices on CPUs, compiled by numba and called by XLA.

A group of 32 columns of a packed matrix lies in one piece and is read from one end to the other, once per tile of
rows; it is small enough to stay in the nearest caches meanwhile. Groups are shared among threads. A row's sums run
over the inner dimension in one order, so its result has the same bits whatever rows are computed beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from pallas_kernels.common.cpu_calls import KEPT, argument, register, result, source_version, words
from pallas_kernels.common.cpu_values import KINDS, LINE, OPTIONS, array_at, item_bytes, load, store
from pallas_kernels.matmul import tile
from pallas_kernels.matmul.tile import COLUMNS, LANES, PARTS, ROWS, Loop, factor_kind, loaded, make_tile, word

ITEMS_PER_THREAD = 4

STEP_BYTES = 4
"""Of each column in a step: one float32 or two numbers of 16 bits."""

WEIGHTS = KINDS | {"float16": np.int16(0)}
"""A number that tells jitted code the dtype of a packed matrix; that of float16 is a sign only, never computed with."""

_HIGH, _MIDDLE, _LOW, _ONE = (ROWS[min(index, len(ROWS) - 1)] for index in range(4))
_high_tile, _middle_tile, _low_tile, _one_tile = map(make_tile, (_HIGH, _MIDDLE, _LOW, _ONE))

# Where a tile has few rows, narrow matrices are made float32 for many rows at once, in pieces that stay in the nearest
# cache. For few rows it pays no more than to do so for each tile.
_PIECE, _FEW_ROWS = 64, 8
_high_more, _middle_more, _low_more, _one_more = (make_tile(rows, adds=True) for rows in (_HIGH, _MIDDLE, _LOW, _ONE))
MOST_ROWS = _HIGH if PARTS == 1 else 32
"""Rows that are multiplied at once."""


@njit(**OPTIONS)
def _plan_items(frame, threads):
    groups = argument(frame, 1)[1][0]
    plan = np.empty(2, np.int64)
    plan[1] = max(1, groups // (ITEMS_PER_THREAD * threads))
    plan[0] = (groups + plan[1] - 1) // plan[1]
    return plan


def multiply_rows(
    kind: Any, weight: Any, x: Any, stride: Any, w: Any, steps: Any, out: Any, out_stride: Any, row: Any, end: Any,
    following: Any,
) -> int:  # fmt: skip
    """Rows from `row` on, some of those before `end`, times a group of columns; returns how many, at most `MOST_ROWS`.

    For jitted code.

    Args:
      kind, weight: see `make_tile`.
      x, stride: address of row 0, and bytes from row to row.
      w: address of the group.
      steps: of the inner dimension.
      out, out_stride: address of float32[MOST_ROWS, COLUMNS] for the results, and bytes from row to row.
      following: address of the group that the thread is likely to multiply next. It is fetched during the first one or
        two tiles for this group, so that memory is not idle while a group is multiplied by many rows.
    """
    raise NotImplementedError("only in jitted code")


@overload(multiply_rows, jit_options=OPTIONS)
def _multiply_rows(kind, weight, x, stride, w, steps, out, out_stride, row, end, following):
    if PARTS == 1 or kind == weight:
        return lambda kind, weight, x, stride, w, steps, out, out_stride, row, end, following: _multiply_tile(
            kind, weight, x, stride, w, steps, out, out_stride, row, end, following
        )

    def multiply(kind, weight, x, stride, w, steps, out, out_stride, row, end, following):
        if end - row <= _FEW_ROWS:
            return _multiply_tile(kind, weight, x, stride, w, steps, out, out_stride, row, end, following)
        return _multiply_widened(weight, x, stride, w, steps, out, out_stride, row, end, following)

    return multiply


@njit(**OPTIONS)
def _multiply_tile(kind, weight, x, stride, w, steps, out, out_stride, row, end, following):
    """`multiply_rows` by one tile."""
    here, fetch, fetch_bytes = x + row * stride, following, 2 * LINE
    if end > _HIGH:
        fetch_bytes = LINE
        if row == _HIGH:
            fetch += steps * LINE
        elif row:
            fetch, fetch_bytes = w, 0
    if end - row >= _HIGH:
        _high_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _HIGH
    if end - row >= _MIDDLE:
        _middle_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _MIDDLE
    if end - row >= _LOW:
        _low_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _LOW
    _one_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_bytes)
    return _ONE


@njit(**OPTIONS)
def _multiply_widened(weight, x, stride, w, steps, out, out_stride, row, end, following):
    """`multiply_rows` of float32 with a narrower matrix, by many tiles: sums go through `out` from piece to piece."""
    kind, row_bytes = np.float32(0), item_bytes(weight) * COLUMNS
    done, numbers = min(end - row, MOST_ROWS), steps * STEP_BYTES // item_bytes(weight)
    wide = np.empty((_PIECE, COLUMNS), np.float32)
    for i in range(done):
        array_at(kind, out + i * out_stride, (COLUMNS,))[:] = 0
    for first in range(0, numbers, _PIECE):
        size = min(_PIECE, numbers - first)
        _widen(weight, w + first * row_bytes, wide.ctypes.data, size * item_bytes(weight) // STEP_BYTES)
        fetch, fetch_bytes = following + first * row_bytes, row_bytes if row == 0 else 0
        i = 0
        while i < done:
            at, to = x + (row + i) * stride + 4 * first, out + i * out_stride
            options = (at, stride, wide.ctypes.data, size, to, out_stride, fetch, fetch_bytes)
            i += _add_tile(kind, done - i, options)
            fetch_bytes = 0
    wide[0, 0] = 0  # it lives until here
    return done


@njit(**OPTIONS)
def _add_tile(kind, left, options):
    """Some of `left` rows, added to what they have; returns how many. `options` are those of a tile."""
    x, stride, w, steps, out, out_stride, fetch, fetch_bytes = options
    if left >= _HIGH:
        _high_more(kind, kind, x, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _HIGH
    if left >= _MIDDLE:
        _middle_more(kind, kind, x, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _MIDDLE
    if left >= _LOW:
        _low_more(kind, kind, x, stride, w, steps, out, out_stride, fetch, fetch_bytes)
        return _LOW
    _one_more(kind, kind, x, stride, w, steps, out, out_stride, fetch, fetch_bytes)
    return _ONE


@intrinsic
def _widen(typing: Any, weight: Any, source: Any, target: Any, steps: Any) -> Any:
    """Makes steps (see `make_tile`) of a matrix of 16 bits float32, from one address to another."""
    vectors = range(COLUMNS // LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, steps = args
        loop = Loop(builder, word(0), steps, 1, [])
        here = builder.add(source, builder.mul(loop.index, word(4 * COLUMNS)))
        to = builder.add(target, builder.mul(loop.index, word(8 * COLUMNS)))
        rows = loaded(builder, types.float32, weight, here, vectors)
        for n, vector in enumerate(each for row in rows for each in row):
            place = builder.inttoptr(builder.add(to, word(4 * LANES * n)), vector.type.as_pointer())
            builder.store(vector, place, align=4)
        loop.end([])
        return context.get_dummy_value()

    return types.void(weight, *(types.int64,) * 3), generate


@njit(**OPTIONS)
def as_factors(kind, x, count):
    """The numbers at an address as float32 if that is how they are multiplied (`factor_kind`), else nothing."""
    is_wider = item_bytes(factor_kind(kind)) > item_bytes(kind)
    wide, narrow = np.empty(count * is_wider, np.float32), array_at(kind, x, (count,))
    for i in range(wide.size):
        wide[i] = load(narrow[i])
    return wide


@njit(**OPTIONS)
def _multiply(kind, weight, x, rows, in_size, matrix, out, first, end):
    """Groups [first, end) of the columns; `x` and `matrix` are addresses, `kind` and `weight` tell their types."""
    factor, wide = factor_kind(kind), as_factors(kind, x, rows * in_size)
    if wide.size:
        x = wide.ctypes.data
    scratch = np.empty((MOST_ROWS, COLUMNS), np.float32)
    stride, column_bytes = in_size * item_bytes(factor), in_size * item_bytes(weight)
    steps, size = column_bytes // STEP_BYTES, column_bytes * COLUMNS
    for group in range(first, end):
        w = matrix + group * size
        row = 0
        while row < rows:
            done = multiply_rows(
                factor, weight, x, stride, w, steps, scratch.ctypes.data, 4 * COLUMNS, row, rows, w + size
            )
            for i in range(done):
                target = out[row + i, group * COLUMNS : (group + 1) * COLUMNS]
                for j in range(COLUMNS):
                    store(target, j, scratch[i, j])
            row += done
    wide[:1] = 0  # it lives until here


@njit(**OPTIONS)
def _sizes(frame, plan, item):
    """Address of x, rows, numbers of a row, address of the matrix, columns, and the item's groups."""
    x, shape = argument(frame, 0)
    matrix, packed = argument(frame, 1)
    size = words(plan, 2)[1]
    end = min(packed[0], (item + 1) * size)
    return x, shape[0], shape[1], matrix, packed[0] * COLUMNS, item * size, end


def _compiled_parts(version: int, dtype: str, weight_dtype: str, out_dtype: str) -> tuple[Any, Any]:
    """`plan_items` and `run_item`, as `register` takes them; `version` is in the key under which their code is kept."""
    kind, weight, out_kind = KINDS[dtype], WEIGHTS[weight_dtype], KINDS[out_dtype]

    @njit(**KEPT)
    def plan_items(frame, threads):
        _ = version
        return _plan_items(frame, threads)

    @njit(**KEPT)
    def run_item(frame, plan, item):
        _ = version
        x, rows, in_size, matrix, columns, first, end = _sizes(frame, plan, item)
        out = array_at(out_kind, result(frame, 0), (rows, columns))
        _multiply(kind, weight, x, rows, in_size, matrix, out, first, end)

    return plan_items, run_item


@functools.cache
def call_name(dtype: str, weight_dtype: str, out_dtype: str) -> str:
    """The custom call for x of `dtype` and a matrix of another; compiled when first asked for."""
    name = f"pallas_kernels.matmul.{dtype}.{weight_dtype}.{out_dtype}"
    version = source_version(__file__, tile.__file__)
    register(name, *_compiled_parts(version, dtype, weight_dtype, out_dtype))
    return name
