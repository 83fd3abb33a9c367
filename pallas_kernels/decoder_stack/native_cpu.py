"""The decoder layers of a step for CPUs, compiled by numba and called once by XLA.

Layer by layer, XLA would make some dozens of small operations, each with its own start and end on every thread. Here
the threads stay together from the first layer to the last: the work of a step is one sequence of items that they take
in turn,

    gathered │ of each layer: norm │ q, k, v │ rope, K and V kept │ attention │ o │ norm │ gate, up │ down │ put back

and an item of a phase begins when all items of the phases before it are done. Between gathering and putting back there
are rows of live tokens only: padding costs nothing. Numbers are rounded where the layers of `jaxserve.models` round
them. A token's result has the same bits whatever is computed beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels.common.cpu_calls import KEPT, argument, register, result, source_version, words
from pallas_kernels.common.cpu_values import (
    KINDS,
    OPTIONS,
    array_at,
    item_bytes,
    load,
    pointer_f32,
    pointer_i32,
    rounded,
    store,
    store_as,
)
from pallas_kernels.decoder_stack import layout as at
from pallas_kernels.decoder_stack import parts
from pallas_kernels.decoder_stack.parts import activate, keep, normalise, rotate
from pallas_kernels.matmul import quantised, quantised_cpu, quantised_tile
from pallas_kernels.matmul.native_cpu import MOST_ROWS, STEP_BYTES, WEIGHTS, multiply_rows
from pallas_kernels.matmul.quantised import QuantisedForm
from pallas_kernels.matmul.quantised_cpu import multiply_quantised_rows
from pallas_kernels.matmul.quantised_tile import block_sum
from pallas_kernels.matmul.tile import COLUMNS, factor_kind
from pallas_kernels.paged_attention import native_cpu as attention
from pallas_kernels.paged_attention.native_cpu import aligned, attend, scratch_words, work_kind


@njit(**OPTIONS)
def _bias(kind, frame, matrix, layer, columns):
    """A matrix' bias in a layer, or an empty array."""
    address, shape = argument(frame, at.BIAS + matrix)
    if shape.shape[0] == 1:
        return array_at(kind, address, (0,))
    return array_at(kind, address + layer * columns * item_bytes(kind), (columns,))


@njit(**OPTIONS)
def _multiply(kind, weight, form, frame, plan, matrix, layer, group, x, in_size, sums, row, end, out):
    """Some rows of x [rows, in_size], from `row` on, times a group of columns; returns how many.

    Args:
      kind: of x, see `factor_kind`.
      weight: a number of the matrix' type, see `WEIGHTS`; not looked at if it is quantised.
      form: of the matrix; None: it is not quantised.
      sums: address of the sums of x's blocks, see `_sum_blocks`.
      out: float32[MOST_ROWS, COLUMNS].
    """
    address, shape = argument(frame, at.MATRIX + matrix)
    index, stride = layer * shape[1] + group, in_size * item_bytes(kind)
    if form is None:
        column_bytes = in_size * item_bytes(weight)
        steps, size = column_bytes // STEP_BYTES, column_bytes * COLUMNS
        w = address + index * size
        to_fetch = w + plan[at.THREADS] * size
        return multiply_rows(
            kind, weight, x, stride, w, steps, out.ctypes.data, 4 * COLUMNS, row, end, to_fetch
        )  # fmt: skip
    else:
        blocks = in_size // form.block
        integers = address + index * blocks * form.integer_bytes
        scales = argument(frame, at.SCALES + matrix)[0] + index * blocks * form.scale_bytes
        return multiply_quantised_rows(
            kind, form, x + row * stride, stride, sums + row * 4 * blocks, 4 * blocks, integers, scales, blocks,
            out.ctypes.data, end - row,
        )  # fmt: skip


@njit(**OPTIONS)
def _sum_blocks(kind, form, x, width, sums, first, end, column, columns):
    """Writes the sums of blocks of x, if the form's blocks have a minimum: whoever writes x does.

    Args:
      x: address of [rows, width].
      sums: address of float32[rows, width / block].
      first, end: rows.
      column, columns: the first, and how many; in blocks.
    """
    if form is not None and form.has_minimum:
        to = array_at(np.float32(0), sums, (end, width // form.block))
        for i in range(first, end):
            for block in range(column // form.block, (column + columns) // form.block):
                to[i, block] = block_sum(kind, form, x + (i * width + block * form.block) * item_bytes(kind))


@njit(**OPTIONS)
def _project(kind, weight, form, frame, plan, matrix, layer, group, part, x, in_size, block_sums, out, adds):
    """A group of columns of `x @ matrix + bias`, rows of one part; to `out`, or added to it."""
    rows = plan[at.ROWS]
    columns = argument(frame, at.MATRIX + matrix)[1][1] * COLUMNS
    bias = _bias(kind, frame, matrix, layer, columns)
    scratch, factor = np.empty((MOST_ROWS, COLUMNS), np.float32), factor_kind(kind)
    to = array_at(kind, out, (rows, columns))
    row, end = _part(plan, part)
    while row < end:
        done = _multiply(
            factor, weight, form, frame, plan, matrix, layer, group, x, in_size, block_sums, row, end, scratch
        )  # fmt: skip
        for i in range(done):
            sums, target = scratch[i], to[row + i, group * COLUMNS : (group + 1) * COLUMNS]
            if bias.shape[0]:
                for j in range(COLUMNS):
                    sums[j] = rounded(kind, sums[j]) + load(bias[group * COLUMNS + j])
            if adds:
                for j in range(COLUMNS):
                    store(target, j, load(target[j]) + rounded(kind, sums[j]))
            else:
                for j in range(COLUMNS):
                    store(target, j, sums[j])
        row += done


@njit(**OPTIONS)
def _gate_and_up(kind, weight, form, frame, plan, activation, layer, group, part):
    """A group of columns of `act(gate(x)) * up(x)`, rows of one part."""
    rows, hidden, inner = plan[at.ROWS], plan[at.HIDDEN], plan[at.INNER]
    x, block_sums = plan[at.NORMED], plan[at.NORMED_SUMS]
    scratch, factor = np.empty((2, MOST_ROWS, COLUMNS), np.float32), factor_kind(kind)
    to = array_at(factor, plan[at.MLP], (rows, inner))
    row, end = _part(plan, part)
    while row < end:
        done = 0
        for which in range(2):
            matrix, out = at.GATE_PROJ + which, scratch[which]
            done = _multiply(
                factor, weight, form, frame, plan, matrix, layer, group, x, hidden, block_sums, row, end, out
            )  # fmt: skip
            bias = _bias(kind, frame, matrix, layer, inner)
            for i in range(done):
                sums = scratch[which, i]
                if bias.shape[0]:
                    for j in range(COLUMNS):
                        sums[j] = rounded(kind, sums[j]) + load(bias[group * COLUMNS + j])
                for j in range(COLUMNS):
                    sums[j] = rounded(kind, sums[j])
        for i in range(done):
            target = to[row + i, group * COLUMNS : (group + 1) * COLUMNS]
            gate, up = scratch[0, i], scratch[1, i]
            activate(activation, gate)
            for j in range(COLUMNS):
                store_as(kind, target, j, gate[j] * up[j])
        column = group * COLUMNS
        _sum_blocks(factor, form, plan[at.MLP], inner, plan[at.MLP_SUMS], row, row + done, column, COLUMNS)
        row += done


@njit(**OPTIONS)
def _part(plan, part):
    """Rows [first, end) of a part: whole tiles, but for the last one's."""
    tiles = (plan[at.ROWS] + MOST_ROWS - 1) // MOST_ROWS
    first, end = part * tiles // plan[at.ROW_PARTS], (part + 1) * tiles // plan[at.ROW_PARTS]
    return first * MOST_ROWS, min(end * MOST_ROWS, plan[at.ROWS])


@njit(**OPTIONS)
def _gather(kind, frame, plan, sources, item):
    """Live rows into the residual stream."""
    size = (plan[at.TOKENS], plan[at.HIDDEN])
    x, to = array_at(kind, argument(frame, at.X)[0], size), array_at(kind, plan[at.RESIDUAL], size)
    for i in range(at.ROW_ITEM * item, min(at.ROW_ITEM * (item + 1), plan[at.ROWS])):
        to[i] = x[sources[i]]


@njit(**OPTIONS)
def _put_back(kind, frame, plan, sources, item):
    """The residual stream into its rows of the flat batch, zeros into the others."""
    size = (plan[at.TOKENS], plan[at.HIDDEN])
    out, x = array_at(kind, result(frame, at.OUT), size), array_at(kind, plan[at.RESIDUAL], size)
    first, end = at.ROW_ITEM * item, min(at.ROW_ITEM * (item + 1), plan[at.TOKENS])
    live = np.searchsorted(sources, first)
    for t in range(first, end):
        if live < plan[at.ROWS] and sources[live] == t:
            out[t] = x[live]
            live += 1
        else:
            out[t] = 0


@njit(**OPTIONS)
def _rope(kind, pool, frame, plan, sources, layer, item):
    """Rotates q and k, and writes k and v to their pages."""
    rows, tokens, dim = plan[at.ROWS], plan[at.TOKENS], plan[at.DIM]
    half = argument(frame, at.COS)[1][1]
    cos = carray(pointer_f32(argument(frame, at.COS)[0]), (tokens, half))
    sin = carray(pointer_f32(argument(frame, at.SIN)[0]), (tokens, half))
    page_ids, offsets = at.int32s(frame, at.PAGE_IDS), at.int32s(frame, at.OFFSETS)
    _, group, place = _of_layer(frame, layer)
    first = tokens * group
    q = array_at(kind, plan[at.QUERIES], (rows, plan[at.HEADS], dim))
    k = array_at(kind, plan[at.KEYS], (rows, plan[at.KV_HEADS], dim))
    v = array_at(kind, plan[at.VALUES], (rows, plan[at.KV_HEADS], dim))
    for i in range(at.ROW_ITEM * item, min(at.ROW_ITEM * (item + 1), rows)):
        t = sources[i]
        rotate(q, i, cos[t], sin[t])
        rotate(k, i, cos[t], sin[t])
        keep(k, i, pool, place, page_ids[first + t], 0, offsets[t])
        keep(v, i, pool, place, page_ids[first + t], 1, offsets[t])


@njit(**OPTIONS)
def _of_layer(frame, layer):
    """Window, group and place in the pool of a layer."""
    numbers = at.int32s(frame, at.WINDOWS)[at.LAYER_NUMBERS * layer : at.LAYER_NUMBERS * (layer + 1)]
    return np.int64(numbers[0]), np.int64(numbers[1]), np.int64(numbers[2])


@njit(**OPTIONS)
def _attend(kind, form, work, pool, frame, plan, scale, address, layer, item):
    """A block of queries over some KV heads, which lie side by side in a page."""
    rows, heads, dim, kv_heads = plan[at.ROWS], plan[at.HEADS], plan[at.DIM], plan[at.KV_HEADS]
    split = plan[at.HEAD_PARTS]
    window, group, place = _of_layer(frame, layer)
    queries = _queries(frame, plan, address, group, item // split)
    pages, begin, count, position = queries
    q = array_at(kind, plan[at.QUERIES], (rows, heads, dim))
    factor = factor_kind(kind)
    out = array_at(factor, plan[at.MIXED], (rows, heads, dim))
    no_sinks = array_at(np.float32(0), address, (0,))
    scratch = np.empty(scratch_words(work, count * (heads // kv_heads), dim), np.int64)
    options = (scale, window, np.float32(0))
    first, end = item % split * kv_heads // split, (item % split + 1) * kv_heads // split
    for head in range(first, end):
        after, head_after = queries, head + 1
        if head_after == end:
            following = min(item + plan[at.THREADS], plan[at.BLOCKS] * split - 1)
            after = _queries(frame, plan, address, group, following // split)
            head_after = following % split * kv_heads // split
        oldest_after, end_after = max(after[3] - window + 1, 0), after[3] + after[2]
        attend(
            work,
            q,
            pool,
            place,
            (pages, head, begin, count, position),
            options,
            no_sinks,
            out,
            aligned(scratch.ctypes.data),
            (after[0], head_after, oldest_after, end_after),
        )
    scratch[0] = 0  # it lives until here
    size, x, sums = heads // kv_heads * dim, plan[at.MIXED], plan[at.MIXED_SUMS]
    _sum_blocks(factor, form, x, heads * dim, sums, begin, begin + count, first * size, (end - first) * size)


@njit(**OPTIONS)
def _queries(frame, plan, address, group, block):
    """Page table in a group, first query, count and the first one's position of a block of queries."""
    words_before = at.SOURCES + plan[at.TOKENS] + at.BLOCK_WORDS * block
    table, begin, count, position, stride = words(address + 8 * words_before, at.BLOCK_WORDS)
    pages = carray(pointer_i32(table + stride * group), (argument(frame, at.DECODE_PAGES)[1][2],))
    return pages, begin, count, position


@njit(**OPTIONS)
def _norm(kind, form, frame, plan, which, eps, layer, item):
    hidden = plan[at.HIDDEN]
    size = (plan[at.ROWS], hidden)
    factor = factor_kind(kind)
    x, to = array_at(kind, plan[at.RESIDUAL], size), array_at(factor, plan[at.NORMED], size)
    scale = array_at(kind, argument(frame, which)[0] + layer * hidden * item_bytes(kind), (hidden,))
    first, end = at.ROW_ITEM * item, min(at.ROW_ITEM * (item + 1), plan[at.ROWS])
    normalise(x, scale, eps, to, first, end)
    _sum_blocks(factor, form, plan[at.NORMED], hidden, plan[at.NORMED_SUMS], first, end, 0, hidden)


@njit(**OPTIONS)
def _qkv(kind, weight, form, frame, plan, layer, item):
    group, part = item // plan[at.ROW_PARTS], item % plan[at.ROW_PARTS]
    queries = plan[at.HEADS] * plan[at.DIM] // COLUMNS
    keys = plan[at.KV_HEADS] * plan[at.DIM] // COLUMNS
    matrix, out = at.Q_PROJ, plan[at.QUERIES]
    if group >= queries + keys:
        matrix, out, group = at.V_PROJ, plan[at.VALUES], group - queries - keys
    elif group >= queries:
        matrix, out, group = at.K_PROJ, plan[at.KEYS], group - queries
    x, sums = plan[at.NORMED], plan[at.NORMED_SUMS]
    _project(kind, weight, form, frame, plan, matrix, layer, group, part, x, plan[at.HIDDEN], sums, out, False)


@njit(**OPTIONS)
def _add(kind, weight, form, frame, plan, matrix, layer, item, x, in_size, sums):
    """A product added to the residual stream."""
    group, part = item // plan[at.ROW_PARTS], item % plan[at.ROW_PARTS]
    _project(kind, weight, form, frame, plan, matrix, layer, group, part, x, in_size, sums, plan[at.RESIDUAL], True)


@njit(**OPTIONS)
def _run_item(kind, weight, form, work, pool, frame, address, item):
    plan = words(address, at.SOURCES)
    sources = words(address + 8 * at.SOURCES, plan[at.ROWS])
    if item < plan[at.GATHER]:
        _gather(kind, frame, plan, sources, item)
        return
    item -= plan[at.GATHER]
    if item >= at.layer_items(plan):
        _put_back(kind, frame, plan, sources, item - at.layer_items(plan))
        return
    layer, item = item // plan[at.PER_LAYER], item % plan[at.PER_LAYER]
    options = carray(pointer_f32(argument(frame, at.NUMBERS)[0]), (3,))
    ends = plan[at.ENDS : at.ENDS + at.NUM_PHASES]
    split = plan[at.ROW_PARTS]
    if item < ends[at.FIRST_NORM]:
        _norm(kind, form, frame, plan, at.NORM, options[0], layer, item)
    elif item < ends[at.QKV]:
        _qkv(kind, weight, form, frame, plan, layer, item - ends[at.FIRST_NORM])
    elif item < ends[at.ROPE]:
        _rope(kind, pool, frame, plan, sources, layer, item - ends[at.QKV])
    elif item < ends[at.ATTEND]:
        _attend(kind, form, work, pool, frame, plan, options[1], address, layer, item - ends[at.ROPE])
    elif item < ends[at.OUTPUT]:
        size = plan[at.HEADS] * plan[at.DIM]
        x, sums = plan[at.MIXED], plan[at.MIXED_SUMS]
        _add(kind, weight, form, frame, plan, at.O_PROJ, layer, item - ends[at.ATTEND], x, size, sums)
    elif item < ends[at.MIDDLE_NORM]:
        _norm(kind, form, frame, plan, at.SECOND_NORM, options[0], layer, item - ends[at.OUTPUT])
    elif item < ends[at.GATED]:
        item -= ends[at.MIDDLE_NORM]
        _gate_and_up(kind, weight, form, frame, plan, np.int64(options[2]), layer, item // split, item % split)
    else:
        x, sums = plan[at.MLP], plan[at.MLP_SUMS]
        _add(kind, weight, form, frame, plan, at.DOWN_PROJ, layer, item - ends[at.GATED], x, plan[at.INNER], sums)


def _compiled_parts(version: int, dtype: str, pool_dtype: str, weights: str | QuantisedForm) -> tuple[Any, Any, Any]:
    """What `register` takes; `version` is in the key under which their code is kept."""
    kind, pool_kind, work = KINDS[dtype], KINDS[pool_dtype], work_kind(dtype, pool_dtype)
    weight, form = (WEIGHTS[weights], None) if isinstance(weights, str) else (kind, weights)
    element_bytes, factor_bytes, sums_block = int(kind.itemsize), at.factor_bytes(dtype), at.sums_block(weights)

    @njit(**KEPT)
    def plan_items(frame, threads):
        _ = version
        return at.plan_items(frame, threads, element_bytes, factor_bytes, sums_block)

    @njit(**KEPT)
    def run_item(frame, plan, item):
        _ = version
        address, shape = argument(frame, at.POOL)
        pool = array_at(pool_kind, address, (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]))
        _run_item(kind, weight, form, work, pool, frame, plan, item)

    @njit(**KEPT)
    def items_before(plan, item):
        _ = version
        return at.items_before(plan, item)

    return plan_items, run_item, items_before


@functools.cache
def call_name(dtype: str, pool_dtype: str, weights: str | QuantisedForm) -> str:
    """The custom call for x and pool of these dtypes and matrices of a dtype or form; compiled when first asked for.

    Raises:
      ValueError: the processor cannot do it.
    """
    if isinstance(weights, QuantisedForm):
        quantised_cpu.check_processor(weights)
    of_weights = weights if isinstance(weights, str) else weights.name
    name = f"pallas_kernels.decoder_stack.{dtype}.{pool_dtype}.{of_weights}"
    files = (str(module.__file__) for module in (at, parts, attention, quantised, quantised_cpu, quantised_tile))
    version = source_version(__file__, *files, *attention.SOURCES)
    register(name, *_compiled_parts(version, dtype, pool_dtype, weights))
    return name
