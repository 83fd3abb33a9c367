"""Products with quantised matrices on CPUs, compiled by numba and called by XLA.

As `native_cpu`, whose words about groups, threads and rows hold here. Blocks are decoded and summed in one way for
every number of rows, so a row's result has the same bits whatever rows are computed beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from pallas_kernels.common import native
from pallas_kernels.common.cpu_calls import KEPT, argument, register, result, source_version, words
from pallas_kernels.common.cpu_values import KINDS, OPTIONS, array_at, item_bytes, store
from pallas_kernels.matmul import native_cpu as products
from pallas_kernels.matmul import quantised, quantised_tile, tile
from pallas_kernels.matmul.native_cpu import as_factors
from pallas_kernels.matmul.quantised import QuantisedForm
from pallas_kernels.matmul.quantised_tile import block_sum, make_quantised_tile
from pallas_kernels.matmul.tile import COLUMNS, ROWS, factor_kind

ITEMS_PER_THREAD = 4

# Two rows too: to decode blocks once for each of them would take as long as for four.
_SIZES = sorted({*ROWS, 2}, reverse=True)
_HIGH, _MIDDLE, _LOW, _TWO, _ONE = (_SIZES[min(index, len(_SIZES) - 1)] for index in range(5))
MOST_ROWS = _HIGH
"""Rows of the largest tile."""
_high_tile, _middle_tile, _low_tile, _two_tile, _one_tile = map(make_quantised_tile, (_HIGH, _MIDDLE, _LOW, _TWO, _ONE))


@njit(**OPTIONS)
def block_sums(kind, form, x, rows, blocks, sums):
    """Writes float32[rows, blocks], the sum of each block of each row of `x`; both are addresses."""
    size = array_at(kind, x, (1,)).itemsize * form.block
    out = array_at(np.float32(0), sums, (rows * blocks,))
    for block in range(rows * blocks):
        out[block] = block_sum(kind, form, x + block * size)


@njit(**OPTIONS)
def multiply_quantised_rows(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out, left):
    """Some of `left` rows from address `x` on, times a group of columns; returns how many, at most `MOST_ROWS`.

    See `make_quantised_tile`; `out` is float32[MOST_ROWS, COLUMNS].
    """
    if left >= _HIGH:
        _high_tile(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out)
        return _HIGH
    if left >= _MIDDLE:
        _middle_tile(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out)
        return _MIDDLE
    if left >= _LOW:
        _low_tile(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out)
        return _LOW
    if left >= _TWO:
        _two_tile(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out)
        return _TWO
    _one_tile(kind, form, x, stride, sums, sums_stride, integers, scales, blocks, out)
    return _ONE


@njit(**OPTIONS)
def multiply_quantised(kind, form, x, sums, rows, blocks, integers, scales, out, first, end):
    """Groups [first, end) of the columns of a product.

    Args:
      kind: a number of x's type, see `KINDS`.
      form: the matrix' `QuantisedForm`.
      x: address of [rows, blocks * form.block].
      sums: address of what `block_sums` wrote; not read if the form has no minimum.
      rows: of x.
      blocks: below each other in a column.
      integers, scales: addresses of the matrix' arrays.
      out: array [rows, columns] of float32, or of bfloat16 as uint16.
      first, end: groups of 32 columns.
    """
    factor, wide = factor_kind(kind), as_factors(kind, x, rows * form.block * blocks)
    if wide.size:
        x = wide.ctypes.data
    scratch = np.empty((MOST_ROWS, COLUMNS), np.float32)
    stride, sums_stride = item_bytes(factor) * form.block * blocks, 4 * blocks
    for group in range(first, end):
        w, s = integers + group * blocks * form.integer_bytes, scales + group * blocks * form.scale_bytes
        row = 0
        while row < rows:
            done = multiply_quantised_rows(
                factor, form, x + row * stride, stride, sums + row * sums_stride, sums_stride, w, s, blocks,
                scratch.ctypes.data, rows - row,
            )  # fmt: skip
            for i in range(done):
                target = out[row + i, group * COLUMNS : (group + 1) * COLUMNS]
                for j in range(COLUMNS):
                    store(target, j, scratch[i, j])
            row += done
    wide[:1] = 0  # it lives until here


def _compiled_parts(version: int, dtype: str, form: QuantisedForm, out_dtype: str) -> tuple[Any, Any]:
    """`plan_items` and `run_item`, as `register` takes them; `version` is in the key under which their code is kept.

    The plan: items, groups of an item, then the sums of the blocks of x if the form has minima.
    """
    kind, out_kind = KINDS[dtype], KINDS[out_dtype]

    @njit(**KEPT)
    def plan_items(frame, threads):
        _ = version
        x, shape = argument(frame, 0)
        packed = argument(frame, 1)[1]
        groups, blocks, rows = packed[0], packed[1], shape[0]
        plan = np.empty(2 + (rows * blocks + 1) // 2 * form.has_minimum, np.int64)
        plan[1] = max(1, groups // (ITEMS_PER_THREAD * threads))
        plan[0] = (groups + plan[1] - 1) // plan[1]
        if form.has_minimum:
            block_sums(kind, form, x, rows, blocks, plan.ctypes.data + 16)
        return plan

    @njit(**KEPT)
    def run_item(frame, plan, item):
        _ = version
        x, shape = argument(frame, 0)
        integers, packed = argument(frame, 1)
        scales, _sizes = argument(frame, 2)
        size = words(plan, 2)[1]
        end = min(packed[0], (item + 1) * size)
        out = array_at(out_kind, result(frame, 0), (shape[0], packed[0] * COLUMNS))
        multiply_quantised(kind, form, x, plan + 16, shape[0], packed[1], integers, scales, out, item * size, end)

    return plan_items, run_item


def check_processor(form: QuantisedForm) -> None:
    """Raises ValueError if the processor cannot multiply with such matrices."""
    if form.scale == "float16" and not native.widens_float16():
        raise ValueError("products with quantised matrices need a processor that widens float16 (F16C)")


@functools.cache
def call_name(dtype: str, form: QuantisedForm, out_dtype: str) -> str:
    """The custom call for x of `dtype` and a matrix' form; compiled when first asked for.

    Raises:
      ValueError: the processor cannot do it.
    """
    check_processor(form)
    name = f"pallas_kernels.matmul.{dtype}.{form.name}.{out_dtype}"
    files = (__file__, products.__file__, tile.__file__, quantised_tile.__file__, quantised.__file__)
    register(name, *_compiled_parts(source_version(*files), dtype, form, out_dtype))
    return name
