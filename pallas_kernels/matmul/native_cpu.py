"""Products with packed matrices on CPUs, compiled by numba and called by XLA.

A group of 32 columns of a packed matrix lies in one piece and is read from one end to the other, once per tile of
rows; it is small enough to stay in the nearest caches meanwhile. Groups are shared among threads. A row's sums run
over the inner dimension in one order, so its result has the same bits whatever rows are computed beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from pallas_kernels.common.cpu_calls import KEPT, argument, register, result, source_version, words
from pallas_kernels.common.cpu_values import KINDS, LINE, OPTIONS, array_at, item_bytes, store
from pallas_kernels.matmul import tile
from pallas_kernels.matmul.tile import COLUMNS, ROWS, make_tile

ITEMS_PER_THREAD = 4

STEP_BYTES = 4
"""Of each column in a step: one float32 or two numbers of 16 bits."""

WEIGHTS = KINDS | {"float16": np.int16(0)}
"""A number that tells jitted code the dtype of a packed matrix; that of float16 is a sign only, never computed with."""

_HIGH, _MIDDLE, _LOW, _ONE = (ROWS[min(index, len(ROWS) - 1)] for index in range(4))
MOST_ROWS = _HIGH
"""Rows of the largest tile."""
_high_tile, _middle_tile, _low_tile, _one_tile = map(make_tile, (_HIGH, _MIDDLE, _LOW, _ONE))


@njit(**OPTIONS)
def _plan_items(frame, threads):
    groups = argument(frame, 1)[1][0]
    plan = np.empty(2, np.int64)
    plan[1] = max(1, groups // (ITEMS_PER_THREAD * threads))
    plan[0] = (groups + plan[1] - 1) // plan[1]
    return plan


@njit(**OPTIONS)
def multiply_rows(kind, weight, x, stride, w, steps, out, out_stride, row, end, following):
    """Rows from `row` on, some of those before `end`, times a group of columns; returns how many, at most `MOST_ROWS`.

    Args:
      kind, weight: see `make_tile`.
      x, stride: address of row 0, and bytes from row to row.
      w: address of the group.
      steps: of the inner dimension.
      out, out_stride: address of float32[MOST_ROWS, COLUMNS] for the results, and bytes from row to row.
      following: address of the group that the thread is likely to multiply next. It is fetched during the first one or
        two calls for this group, so that memory is not idle while a group is multiplied by many rows.
    """
    here, fetch, fetch_stride = x + row * stride, following, 2 * LINE
    if end > MOST_ROWS:
        fetch_stride = LINE
        if row == MOST_ROWS:
            fetch += steps * LINE
        elif row:
            fetch, fetch_stride = w, 0
    if end - row >= _HIGH:
        _high_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_stride)
        return _HIGH
    if end - row >= _MIDDLE:
        _middle_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_stride)
        return _MIDDLE
    if end - row >= _LOW:
        _low_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_stride)
        return _LOW
    _one_tile(kind, weight, here, stride, w, steps, out, out_stride, fetch, fetch_stride)
    return _ONE


@njit(**OPTIONS)
def _multiply(kind, weight, x, rows, in_size, matrix, out, first, end):
    """Groups [first, end) of the columns; `x` and `matrix` are addresses, `kind` and `weight` are as for a tile."""
    scratch = np.empty((MOST_ROWS, COLUMNS), np.float32)
    stride, column_bytes = in_size * item_bytes(kind), in_size * item_bytes(weight)
    steps, size = column_bytes // STEP_BYTES, column_bytes * COLUMNS
    for group in range(first, end):
        w = matrix + group * size
        row = 0
        while row < rows:
            done = multiply_rows(
                kind, weight, x, stride, w, steps, scratch.ctypes.data, 4 * COLUMNS, row, rows, w + size
            )
            for i in range(done):
                target = out[row + i, group * COLUMNS : (group + 1) * COLUMNS]
                for j in range(COLUMNS):
                    store(target, j, scratch[i, j])
            row += done


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
