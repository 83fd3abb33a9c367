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

import jax
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
)
from pallas_kernels.decoder_stack import parts
from pallas_kernels.decoder_stack.parts import activate, keep, normalise, rotate
from pallas_kernels.matmul.native_cpu import MOST_ROWS, STEP_BYTES, multiply_rows
from pallas_kernels.matmul.tile import COLUMNS
from pallas_kernels.paged_attention import native_cpu as attention
from pallas_kernels.paged_attention.native_cpu import QUERY_BLOCK, aligned, attend, scratch_words, work_kind

ROW_ITEM = 4
"""Rows of an item of a phase that is not a product."""
ITEMS_PER_THREAD = 4
"""A product's rows are divided until it has so many items."""

# Arguments of the call, then of the matrices q, k, v, o, gate, up, down, and their biases.
_X, _POOL, _COS, _SIN, _DECODE_POSITION, _DECODE_PAGES, _STARTS, _CONTEXT, _PREFILL_PAGES = range(9)
_PAGE_IDS, _OFFSETS, _WINDOWS, _OPTIONS, _NORM, _SECOND_NORM, _MATRIX = range(9, 16)
_BIAS = _MATRIX + 7
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)
# Results.
_OUT, _NEW_POOL, _SCRATCH = range(3)

# Phases of a layer.
_FIRST_NORM, _QKV, _ROPE, _ATTEND, _OUTPUT, _MIDDLE_NORM, _GATED, _LAST, _NUM_PHASES = range(9)

# Words of the plan. Scratch arrays hold live rows: residual stream, its norm, q, k, v, what attention gives, MLP.
_ITEMS, _ROWS, _TOKENS, _BLOCKS, _LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _DIM, _INNER = range(10)
_GATHER, _PER_LAYER, _ROW_PARTS, _THREADS, _ENDS = (
    10,
    11,
    12,
    13,
    14,
)  # items, and where each phase ends among a layer's
_AT = _ENDS + _NUM_PHASES
_RESIDUAL, _NORMED, _QUERIES, _KEYS, _VALUES, _MIXED, _MLP = range(_AT, _AT + 7)
_SOURCES = _AT + 7
# From there: the flat batch's index of every live row, and four words for every block of queries.
_BLOCK_WORDS = 4


@njit(**OPTIONS)
def _int32s(frame, index):
    address, shape = argument(frame, index)
    count = 1
    for size in shape:
        count *= size
    return carray(pointer_i32(address), (count,))


@njit(**OPTIONS)
def _layer_items(plan):
    """Items of all layers."""
    return plan[_LAYERS] * plan[_PER_LAYER] if plan[_ROWS] else 0


@njit(**OPTIONS)
def _plan_items(frame, threads, element_bytes):
    """The plan: see the words above."""
    shape, pool_shape = argument(frame, _X)[1], argument(frame, _POOL)[1]
    tokens = shape[0]
    positions, starts = _int32s(frame, _DECODE_POSITION), _int32s(frame, _STARTS)
    contexts, width = _int32s(frame, _CONTEXT), argument(frame, _DECODE_PAGES)[1][1]
    decode_pages, prefill_pages = argument(frame, _DECODE_PAGES)[0], argument(frame, _PREFILL_PAGES)[0]
    decode_rows, prompts = positions.shape[0], contexts.shape[0]
    most_blocks = decode_rows + prompts + (tokens - decode_rows) // QUERY_BLOCK
    plan = np.zeros(_SOURCES + tokens + _BLOCK_WORDS * most_blocks, np.int64)
    plan[_TOKENS] = tokens
    plan[_LAYERS], plan[_KV_HEADS], plan[_DIM] = pool_shape[0], pool_shape[3], pool_shape[5]
    plan[_HIDDEN] = shape[1]
    plan[_HEADS] = argument(frame, _MATRIX + _Q)[1][1] * COLUMNS // plan[_DIM]
    plan[_INNER] = argument(frame, _MATRIX + _GATE)[1][1] * COLUMNS

    live = 0
    for row in range(decode_rows):
        if positions[row] >= 0:
            plan[_SOURCES + live] = row
            live += 1
    num_decode = live
    for t in range(starts[prompts]):
        plan[_SOURCES + live] = decode_rows + t
        live += 1
    plan[_ROWS] = live

    # The last queries of a prompt, which see most, are begun first; decoding rows come last.
    blocks = plan[_SOURCES + tokens :]
    n = 0
    for r in range(prompts):
        count = starts[r + 1] - starts[r]
        done = (count - 1) // QUERY_BLOCK * QUERY_BLOCK
        while done >= 0 and count > 0:
            blocks[n] = prefill_pages + 4 * width * r
            blocks[n + 1] = num_decode + starts[r] + done
            blocks[n + 2] = min(QUERY_BLOCK, count - done)
            blocks[n + 3] = contexts[r] - count + done
            n += _BLOCK_WORDS
            done -= QUERY_BLOCK
    for i in range(num_decode):
        row = plan[_SOURCES + i]
        blocks[n] = decode_pages + 4 * width * row
        blocks[n + 1], blocks[n + 2], blocks[n + 3] = i, 1, positions[row]
        n += _BLOCK_WORDS
    plan[_BLOCKS] = n // _BLOCK_WORDS

    address = result(frame, _SCRATCH)
    hidden, queries, keys = plan[_HIDDEN], plan[_HEADS] * plan[_DIM], plan[_KV_HEADS] * plan[_DIM]
    for index, size in enumerate((hidden, hidden, queries, keys, keys, queries, plan[_INNER])):
        plan[_AT + index] = address
        address += tokens * size * element_bytes

    row_items = (live + ROW_ITEM - 1) // ROW_ITEM
    groups = hidden // COLUMNS
    # Whole tiles of rows, so that no part has more work than its share.
    row_parts = min((live + MOST_ROWS - 1) // MOST_ROWS, (ITEMS_PER_THREAD * threads + groups - 1) // groups)
    plan[_ROW_PARTS] = max(row_parts, 1)
    plan[_THREADS] = threads
    counts = (
        row_items,
        (queries + 2 * keys) // COLUMNS * plan[_ROW_PARTS],
        row_items,
        plan[_BLOCKS] * plan[_KV_HEADS],
        groups * plan[_ROW_PARTS],
        row_items,
        plan[_INNER] // COLUMNS * plan[_ROW_PARTS],
        groups * plan[_ROW_PARTS],
    )
    end = 0
    for phase in range(_NUM_PHASES):
        end += counts[phase]
        plan[_ENDS + phase] = end
    plan[_GATHER] = row_items
    plan[_PER_LAYER] = end
    put_back = (tokens + ROW_ITEM - 1) // ROW_ITEM
    plan[_ITEMS] = plan[_GATHER] + _layer_items(plan) + put_back
    return plan


@njit(**OPTIONS)
def _items_before(address, item):
    """Items of all phases before the item's own."""
    plan = words(address, _SOURCES)
    item -= plan[_GATHER]
    if item < 0:
        return 0
    if item >= _layer_items(plan):
        return plan[_GATHER] + _layer_items(plan)
    within = item % plan[_PER_LAYER]
    before = item - within
    phase = 0
    while within >= plan[_ENDS + phase]:
        phase += 1
    if phase:
        before += plan[_ENDS + phase - 1]
    return plan[_GATHER] + before


@njit(**OPTIONS)
def _bias(kind, frame, matrix, layer, columns):
    """A matrix' bias in a layer, or an empty array."""
    address, shape = argument(frame, _BIAS + matrix)
    if shape.shape[0] == 1:
        return array_at(kind, address, (0,))
    return array_at(kind, address + layer * columns * item_bytes(kind), (columns,))


@njit(**OPTIONS)
def _project(kind, frame, plan, matrix, layer, group, part, x, in_size, out, adds):
    """A group of columns of `x @ matrix + bias`, rows of one part; to `out`, or added to it."""
    rows = plan[_ROWS]
    address, shape = argument(frame, _MATRIX + matrix)
    columns = shape[1] * COLUMNS
    stride = in_size * item_bytes(kind)
    steps = stride // STEP_BYTES
    size = stride * COLUMNS
    w = address + (layer * shape[1] + group) * size
    bias = _bias(kind, frame, matrix, layer, columns)
    scratch = np.empty((MOST_ROWS, COLUMNS), np.float32)
    to = array_at(kind, out, (rows, columns))
    row, end = _part(plan, part)
    while row < end:
        done = multiply_rows(
            kind, x, stride, w, steps, scratch.ctypes.data, 4 * COLUMNS, row, end, w + plan[_THREADS] * size
        )
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
def _gate_and_up(kind, frame, plan, activation, layer, group, part):
    """A group of columns of `act(gate(x)) * up(x)`, rows of one part."""
    rows, hidden, inner = plan[_ROWS], plan[_HIDDEN], plan[_INNER]
    stride = hidden * item_bytes(kind)
    steps = stride // STEP_BYTES
    size = stride * COLUMNS
    offset = (layer * (inner // COLUMNS) + group) * size
    scratch = np.empty((2, MOST_ROWS, COLUMNS), np.float32)
    to = array_at(kind, plan[_MLP], (rows, inner))
    row, end = _part(plan, part)
    while row < end:
        done = 0
        for which in range(2):
            w = argument(frame, _MATRIX + _GATE + which)[0] + offset
            to_fetch = w + plan[_THREADS] * size
            done = multiply_rows(
                kind, plan[_NORMED], stride, w, steps, scratch[which].ctypes.data, 4 * COLUMNS, row, end, to_fetch
            )
            bias = _bias(kind, frame, _GATE + which, layer, inner)
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
                store(target, j, gate[j] * up[j])
        row += done


@njit(**OPTIONS)
def _part(plan, part):
    """Rows [first, end) of a part: whole tiles, but for the last one's."""
    tiles = (plan[_ROWS] + MOST_ROWS - 1) // MOST_ROWS
    first, end = part * tiles // plan[_ROW_PARTS], (part + 1) * tiles // plan[_ROW_PARTS]
    return first * MOST_ROWS, min(end * MOST_ROWS, plan[_ROWS])


@njit(**OPTIONS)
def _gather(kind, frame, plan, sources, item):
    """Live rows into the residual stream."""
    size = (plan[_TOKENS], plan[_HIDDEN])
    x, to = array_at(kind, argument(frame, _X)[0], size), array_at(kind, plan[_RESIDUAL], size)
    for i in range(ROW_ITEM * item, min(ROW_ITEM * (item + 1), plan[_ROWS])):
        to[i] = x[sources[i]]


@njit(**OPTIONS)
def _put_back(kind, frame, plan, sources, item):
    """The residual stream into its rows of the flat batch, zeros into the others."""
    size = (plan[_TOKENS], plan[_HIDDEN])
    out, x = array_at(kind, result(frame, _OUT), size), array_at(kind, plan[_RESIDUAL], size)
    first, end = ROW_ITEM * item, min(ROW_ITEM * (item + 1), plan[_TOKENS])
    live = np.searchsorted(sources, first)
    for t in range(first, end):
        if live < plan[_ROWS] and sources[live] == t:
            out[t] = x[live]
            live += 1
        else:
            out[t] = 0


@njit(**OPTIONS)
def _rope(kind, pool, frame, plan, sources, layer, item):
    """Rotates q and k, and writes k and v to their pages."""
    rows, tokens, dim = plan[_ROWS], plan[_TOKENS], plan[_DIM]
    half = argument(frame, _COS)[1][1]
    cos = carray(pointer_f32(argument(frame, _COS)[0]), (tokens, half))
    sin = carray(pointer_f32(argument(frame, _SIN)[0]), (tokens, half))
    page_ids, offsets = _int32s(frame, _PAGE_IDS), _int32s(frame, _OFFSETS)
    q = array_at(kind, plan[_QUERIES], (rows, plan[_HEADS], dim))
    k = array_at(kind, plan[_KEYS], (rows, plan[_KV_HEADS], dim))
    v = array_at(kind, plan[_VALUES], (rows, plan[_KV_HEADS], dim))
    for i in range(ROW_ITEM * item, min(ROW_ITEM * (item + 1), rows)):
        t = sources[i]
        rotate(q, i, cos[t], sin[t])
        rotate(k, i, cos[t], sin[t])
        keep(k, i, pool, layer, page_ids[t], 0, offsets[t])
        keep(v, i, pool, layer, page_ids[t], 1, offsets[t])


@njit(**OPTIONS)
def _attend(kind, work, pool, frame, plan, scale, address, layer, item):
    """A block of queries over one KV head."""
    rows, heads, dim = plan[_ROWS], plan[_HEADS], plan[_DIM]
    block, head = item // plan[_KV_HEADS], item % plan[_KV_HEADS]
    blocks = address + 8 * (_SOURCES + plan[_TOKENS])
    width = argument(frame, _DECODE_PAGES)[1][1]
    window = np.int64(_int32s(frame, _WINDOWS)[layer])
    following = min(item + plan[_THREADS], plan[_BLOCKS] * plan[_KV_HEADS] - 1)
    table, _, count, position = words(blocks + 8 * _BLOCK_WORDS * (following // plan[_KV_HEADS]), _BLOCK_WORDS)
    pages = carray(pointer_i32(table), (width,))
    after = (pages, following % plan[_KV_HEADS], max(position - window + 1, 0), position + count)
    table, begin, count, position = words(blocks + 8 * _BLOCK_WORDS * block, _BLOCK_WORDS)
    queries = (carray(pointer_i32(table), (width,)), head, begin, count, position)
    q = array_at(kind, plan[_QUERIES], (rows, heads, dim))
    out = array_at(kind, plan[_MIXED], (rows, heads, dim))
    no_sinks = carray(pointer_f32(table), (0,))
    scratch = np.empty(scratch_words(work, count * (heads // plan[_KV_HEADS]), dim), np.int64)
    options = (scale, window, np.float32(0))
    attend(work, q, pool, layer, queries, options, no_sinks, out, aligned(scratch.ctypes.data), after)
    scratch[0] = 0  # it lives until here


@njit(**OPTIONS)
def _norm(kind, frame, plan, which, eps, layer, item):
    hidden = plan[_HIDDEN]
    size = (plan[_ROWS], hidden)
    x, to = array_at(kind, plan[_RESIDUAL], size), array_at(kind, plan[_NORMED], size)
    scale = array_at(kind, argument(frame, which)[0] + layer * hidden * item_bytes(kind), (hidden,))
    normalise(x, scale, eps, to, ROW_ITEM * item, min(ROW_ITEM * (item + 1), plan[_ROWS]))


@njit(**OPTIONS)
def _qkv(kind, frame, plan, layer, item):
    group, part = item // plan[_ROW_PARTS], item % plan[_ROW_PARTS]
    queries = plan[_HEADS] * plan[_DIM] // COLUMNS
    keys = plan[_KV_HEADS] * plan[_DIM] // COLUMNS
    matrix, out = _Q, plan[_QUERIES]
    if group >= queries + keys:
        matrix, out, group = _V, plan[_VALUES], group - queries - keys
    elif group >= queries:
        matrix, out, group = _K, plan[_KEYS], group - queries
    _project(kind, frame, plan, matrix, layer, group, part, plan[_NORMED], plan[_HIDDEN], out, False)


@njit(**OPTIONS)
def _run_item(kind, work, pool, frame, address, item):
    plan = words(address, _SOURCES)
    sources = words(address + 8 * _SOURCES, plan[_ROWS])
    if item < plan[_GATHER]:
        _gather(kind, frame, plan, sources, item)
        return
    item -= plan[_GATHER]
    if item >= _layer_items(plan):
        _put_back(kind, frame, plan, sources, item - _layer_items(plan))
        return
    layer, item = item // plan[_PER_LAYER], item % plan[_PER_LAYER]
    options = carray(pointer_f32(argument(frame, _OPTIONS)[0]), (3,))
    ends = plan[_ENDS : _ENDS + _NUM_PHASES]
    split = plan[_ROW_PARTS]
    if item < ends[_FIRST_NORM]:
        _norm(kind, frame, plan, _NORM, options[0], layer, item)
    elif item < ends[_QKV]:
        _qkv(kind, frame, plan, layer, item - ends[_FIRST_NORM])
    elif item < ends[_ROPE]:
        _rope(kind, pool, frame, plan, sources, layer, item - ends[_QKV])
    elif item < ends[_ATTEND]:
        _attend(kind, work, pool, frame, plan, options[1], address, layer, item - ends[_ROPE])
    elif item < ends[_OUTPUT]:
        item -= ends[_ATTEND]
        size = plan[_HEADS] * plan[_DIM]
        _project(kind, frame, plan, _O, layer, item // split, item % split, plan[_MIXED], size, plan[_RESIDUAL], True)
    elif item < ends[_MIDDLE_NORM]:
        _norm(kind, frame, plan, _SECOND_NORM, options[0], layer, item - ends[_OUTPUT])
    elif item < ends[_GATED]:
        item -= ends[_MIDDLE_NORM]
        _gate_and_up(kind, frame, plan, np.int64(options[2]), layer, item // split, item % split)
    else:
        item -= ends[_GATED]
        size = plan[_INNER]
        _project(kind, frame, plan, _DOWN, layer, item // split, item % split, plan[_MLP], size, plan[_RESIDUAL], True)


def _compiled_parts(version: int, dtype: str, pool_dtype: str) -> tuple[Any, Any, Any]:
    """What `register` takes; `version` is in the key under which their code is kept."""
    kind, pool_kind, work = KINDS[dtype], KINDS[pool_dtype], work_kind(dtype, pool_dtype)
    element_bytes = int(kind.itemsize)

    @njit(**KEPT)
    def plan_items(frame, threads):
        _ = version
        return _plan_items(frame, threads, element_bytes)

    @njit(**KEPT)
    def run_item(frame, plan, item):
        _ = version
        address, shape = argument(frame, _POOL)
        pool = array_at(pool_kind, address, (shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]))
        _run_item(kind, work, pool, frame, plan, item)

    @njit(**KEPT)
    def items_before(plan, item):
        _ = version
        return _items_before(plan, item)

    return plan_items, run_item, items_before


@functools.cache
def call_name(dtype: str, pool_dtype: str) -> str:
    """The custom call for x and pool of these types; compiled when first asked for."""
    name = f"pallas_kernels.decoder_stack.{dtype}.{pool_dtype}"
    version = source_version(__file__, str(parts.__file__), str(attention.__file__), *attention.SOURCES)
    register(name, *_compiled_parts(version, dtype, pool_dtype))
    return name


def scratch_bytes(x: jax.Array, layers: dict[str, Any]) -> int:
    """Of the arrays that hold live rows, see the plan."""
    q, k = (layers["attention"][name]["kernel"].shape[1] * COLUMNS for name in ("q_proj", "k_proj"))
    inner = layers["mlp"]["gate_proj"]["kernel"].shape[1] * COLUMNS
    return int(x.shape[0] * (2 * x.shape[1] + 2 * q + 2 * k + inner) * x.dtype.itemsize)
