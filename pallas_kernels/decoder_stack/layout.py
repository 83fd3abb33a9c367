"""Where things are in a call of `native_cpu`: its arguments, its plan, and the order of its items."""

from __future__ import annotations

import jax
import numpy as np
from numba import carray, njit

from pallas_kernels.common.cpu_calls import argument, result, words
from pallas_kernels.common.cpu_values import OPTIONS, pointer_i32
from pallas_kernels.matmul.native_cpu import MOST_ROWS
from pallas_kernels.matmul.quantised import QuantisedForm
from pallas_kernels.matmul.tile import COLUMNS, HAS_BF16_DOT
from pallas_kernels.paged_attention.native_cpu import QUERY_BLOCK

ROW_ITEM = 4
"""Rows of an item of a phase that is not a product."""
ITEMS_PER_THREAD = 4
"""A product's rows are divided until it has so many items."""

# Arguments of the call, then of the matrices q, k, v, o, gate, up, down, their biases, and their scales.
X, POOL, COS, SIN, DECODE_POSITION, DECODE_PAGES, STARTS, CONTEXT, PREFILL_PAGES = range(9)
PAGE_IDS, OFFSETS, WINDOWS, NUMBERS, NORM, SECOND_NORM, MATRIX = range(9, 16)
BIAS = MATRIX + 7
SCALES = BIAS + 7
Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ = range(7)
# Results.
OUT, NEW_POOL, SCRATCH = range(3)

# Phases of a layer.
FIRST_NORM, QKV, ROPE, ATTEND, OUTPUT, MIDDLE_NORM, GATED, LAST, NUM_PHASES = range(9)

# Words of the plan. Scratch arrays hold live rows: residual stream, its norm, q, k, v, what attention gives, MLP.
ITEMS, ROWS, TOKENS, BLOCKS, LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER = range(10)
# Items of gathering and of a layer, parts of a product's rows, parts of KV heads, threads, ends of phases in a layer.
GATHER, PER_LAYER, ROW_PARTS, HEAD_PARTS, THREADS, ENDS = range(10, 16)
AT = ENDS + NUM_PHASES
RESIDUAL, NORMED, QUERIES, KEYS, VALUES, MIXED, MLP = range(AT, AT + 7)
FACTORS = (NORMED, MIXED, MLP)  # kept as they are multiplied with matrices
# float32 sums of the blocks of the norm, what attention gives and MLP, for matrices whose blocks have a minimum.
NORMED_SUMS, MIXED_SUMS, MLP_SUMS = range(AT + 7, AT + 10)
SOURCES = AT + 10
# From there: the flat batch's index of every live row, and five words for every block of queries.
BLOCK_WORDS = 5
# Numbers of a layer in WINDOWS: its window, its group, its place in the pool.
LAYER_NUMBERS = 3


@njit(**OPTIONS)
def int32s(frame, index):
    """An argument of any shape, flat."""
    address, shape = argument(frame, index)
    count = 1
    for size in shape:
        count *= size
    return carray(pointer_i32(address), (count,))


@njit(**OPTIONS)
def layer_items(plan):
    """Items of all layers."""
    return plan[LAYERS] * plan[PER_LAYER] if plan[ROWS] else 0


@njit(**OPTIONS)
def plan_items(frame, threads, element_bytes, factor_bytes, sums_block):
    """The plan: see the words above.

    Args:
      element_bytes, factor_bytes: of a number, and of one that matrices are multiplied with.
      sums_block: size of the blocks that are summed, 0: none are.
    """
    shape, pool_shape = argument(frame, X)[1], argument(frame, POOL)[1]
    tokens = shape[0]
    positions, starts = int32s(frame, DECODE_POSITION), int32s(frame, STARTS)
    contexts, width = int32s(frame, CONTEXT), argument(frame, DECODE_PAGES)[1][2]
    decode_pages, prefill_pages = argument(frame, DECODE_PAGES)[0], argument(frame, PREFILL_PAGES)[0]
    decode_rows, prompts = positions.shape[0], contexts.shape[0]
    most_blocks = decode_rows + prompts + (tokens - decode_rows) // QUERY_BLOCK
    plan = np.zeros(SOURCES + tokens + BLOCK_WORDS * most_blocks, np.int64)
    plan[TOKENS] = tokens
    plan[LAYERS], plan[KV_HEADS], plan[DIM] = argument(frame, WINDOWS)[1][0], pool_shape[3], pool_shape[5]
    plan[HIDDEN] = shape[1]
    plan[HEADS] = argument(frame, MATRIX + Q_PROJ)[1][1] * COLUMNS // plan[DIM]
    plan[INNER] = argument(frame, MATRIX + GATE_PROJ)[1][1] * COLUMNS

    live = 0
    for row in range(decode_rows):
        if positions[row] >= 0:
            plan[SOURCES + live] = row
            live += 1
    num_decode = live
    for t in range(starts[prompts]):
        plan[SOURCES + live] = decode_rows + t
        live += 1
    plan[ROWS] = live

    # The last queries of a prompt, which see most, are begun first; decoding rows come last.
    blocks = plan[SOURCES + tokens :]
    n = 0
    for r in range(prompts):
        count = starts[r + 1] - starts[r]
        done = (count - 1) // QUERY_BLOCK * QUERY_BLOCK
        while done >= 0 and count > 0:
            blocks[n] = prefill_pages + 4 * width * r
            blocks[n + 1] = num_decode + starts[r] + done
            blocks[n + 2] = min(QUERY_BLOCK, count - done)
            blocks[n + 3] = contexts[r] - count + done
            blocks[n + 4] = 4 * width * prompts
            n += BLOCK_WORDS
            done -= QUERY_BLOCK
    for i in range(num_decode):
        row = plan[SOURCES + i]
        blocks[n] = decode_pages + 4 * width * row
        blocks[n + 1], blocks[n + 2], blocks[n + 3] = i, 1, positions[row]
        blocks[n + 4] = 4 * width * decode_rows
        n += BLOCK_WORDS
    plan[BLOCKS] = n // BLOCK_WORDS

    address = result(frame, SCRATCH)
    hidden, queries, keys = plan[HIDDEN], plan[HEADS] * plan[DIM], plan[KV_HEADS] * plan[DIM]
    for index, size in enumerate((hidden, hidden, queries, keys, keys, queries, plan[INNER])):
        plan[AT + index] = address
        address += tokens * size * (factor_bytes if AT + index in FACTORS else element_bytes)
    if sums_block:
        for index, size in enumerate((hidden, queries, plan[INNER])):
            plan[NORMED_SUMS + index] = address
            address += tokens * (size // sums_block) * 4

    row_items = (live + ROW_ITEM - 1) // ROW_ITEM
    groups = hidden // COLUMNS
    # Whole tiles of rows, so that no part has more work than its share.
    row_parts = min((live + MOST_ROWS - 1) // MOST_ROWS, (ITEMS_PER_THREAD * threads + groups - 1) // groups)
    plan[ROW_PARTS] = max(row_parts, 1)
    # As few as keep threads busy: heads of a page that one thread reads share lines of the page tables.
    most = (ITEMS_PER_THREAD * threads + plan[BLOCKS] - 1) // max(plan[BLOCKS], 1)
    plan[HEAD_PARTS] = max(min(plan[KV_HEADS], most), 1)
    plan[THREADS] = threads
    counts = (
        row_items,
        (queries + 2 * keys) // COLUMNS * plan[ROW_PARTS],
        row_items,
        plan[BLOCKS] * plan[HEAD_PARTS],
        groups * plan[ROW_PARTS],
        row_items,
        plan[INNER] // COLUMNS * plan[ROW_PARTS],
        groups * plan[ROW_PARTS],
    )
    end = 0
    for phase in range(NUM_PHASES):
        end += counts[phase]
        plan[ENDS + phase] = end
    plan[GATHER] = row_items
    plan[PER_LAYER] = end
    put_back = (tokens + ROW_ITEM - 1) // ROW_ITEM
    plan[ITEMS] = plan[GATHER] + layer_items(plan) + put_back
    return plan


@njit(**OPTIONS)
def items_before(address, item):
    """Items of all phases before the item's own."""
    plan = words(address, SOURCES)
    item -= plan[GATHER]
    if item < 0:
        return 0
    if item >= layer_items(plan):
        return plan[GATHER] + layer_items(plan)
    within = item % plan[PER_LAYER]
    before = item - within
    phase = 0
    while within >= plan[ENDS + phase]:
        phase += 1
    if phase:
        before += plan[ENDS + phase - 1]
    return plan[GATHER] + before


def scratch_bytes(x: jax.Array, queries: int, keys: int, inner: int, weights: str | QuantisedForm) -> int:
    """Of the arrays that hold live rows, see the plan.

    Args:
      x: the tokens, padding included.
      queries, keys, inner: columns of q, of k, and of the MLP.
      weights: dtype or form of the matrices.
    """
    tokens, hidden = x.shape
    size = tokens * (hidden + queries + 2 * keys) * x.dtype.itemsize
    size += tokens * (hidden + queries + inner) * factor_bytes(x.dtype.name)
    block = sums_block(weights)
    return int(size + (4 * tokens * (hidden + queries + inner) // block if block else 0))


def factor_bytes(dtype: str) -> int:
    """Of a number that matrices are multiplied with."""
    return 4 if dtype == "float32" or not HAS_BF16_DOT else 2


def sums_block(weights: str | QuantisedForm) -> int:
    """Size of the blocks of x that are summed; 0: none are."""
    return weights.block if isinstance(weights, QuantisedForm) and weights.has_minimum else 0
