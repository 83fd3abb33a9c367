"""Scores and sums of few queries over a block of keys, read where they lie: nothing is packed.

A query's numbers have the bits that the tiles of `pallas_kernels.matmul` give: a score is summed over the dimensions in
their order, and a value over the keys in theirs, from zero.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pallas_kernels.common.cpu_values import LINE, OPTIONS, build_prefetch, item_bytes
from pallas_kernels.matmul.tile import (
    COLUMNS,
    FEATURES,
    INTS,
    LANES,
    ZEROS,
    Loop,
    factors,
    load,
    step_of,
    store_floats,
    word,
)

MOST_AT_ONCE = 4
"""Queries whose sums are kept in registers."""
MOST_FEW = 4
"""Queries up to which it pays not to pack."""
KEYS, GROUPS = (32, 2) if FEATURES.get("avx512f") else (16, 1)
"""Keys, and 32s of dimensions of values, whose sums are kept in registers."""

_WORD, _BIT16 = ir.IntType(64), ir.IntType(16)
_PIECE = ir.VectorType(ir.IntType(32), 4)


def _shuffle(builder: Any, one: Any, two: Any, order: Any) -> Any:
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))


def turn(builder: Any, rows: Any, offset: Any) -> Any:
    """Yields the words of 32 bits of 64 bytes, from `offset` bytes on, of 16 rows: of each word those of all rows.

    Args:
      rows: address of the addresses of the rows.
    """
    starts = [builder.add(load(builder, builder.add(rows, word(8 * row)), _WORD), offset) for row in range(LANES)]
    for piece in range(0, 64, 16):
        quarters = []
        for i in range(4):
            parts = [load(builder, builder.add(starts[row], word(piece)), _PIECE) for row in range(i, LANES, 4)]
            low, high = (_shuffle(builder, *parts[n : n + 2], range(8)) for n in (0, 2))
            quarters.append(_shuffle(builder, low, high, range(16)))
        pairs = []
        for i in (0, 2):
            for first in (0, 2):
                order = [4 * lane + first + k + 16 * side for lane in range(4) for k in range(2) for side in range(2)]
                pairs.append(_shuffle(builder, quarters[i], quarters[i + 1], order))
        for n in range(2):
            for first in (0, 2):
                order = [4 * lane + first + k + 16 * side for lane in range(4) for side in range(2) for k in range(2)]
                yield _shuffle(builder, pairs[n], pairs[n + 2], order)


def fetch_line(builder: Any, rows: Any, row: int, offset: Any) -> None:
    """Asks for the cache line at `offset` bytes of a row; `rows` is the address of the addresses of rows."""
    place = builder.add(load(builder, builder.add(rows, word(8 * row)), _WORD), offset)
    build_prefetch(builder, place, LINE, cache=1)


def make_scores(count: int) -> Any:
    """The jitted `scores(kind, keys, rows, size, x, out, out_stride, ahead)`: of `KEYS` keys; see `few_scores`.

    Args:
      count: of queries.
    """

    @intrinsic
    def scores(
        typing: Any, kind: Any, keys: Any, rows: Any, size: Any, x: Any, out: Any, out_stride: Any, ahead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, rows, size, x, out, out_stride, ahead = args
            step, wider = step_of(kind), kind.bitwidth // keys.bitwidth
            starts = [builder.add(x, builder.mul(size, word(wider * query))) for query in range(count)]
            halves = range(KEYS // LANES)
            loop = Loop(builder, word(0), size, 64, [ZEROS] * count * len(halves))
            totals = list(loop.values)
            turned = [turn(builder, builder.add(rows, word(8 * LANES * half)), loop.index) for half in halves]
            for place, found in enumerate(zip(*turned, strict=True)):
                for row in range(place * len(halves), (place + 1) * len(halves)):
                    fetch_line(builder, ahead, row, loop.index)
                here = builder.mul(loop.index, word(wider))
                for part, numbers in enumerate(_factors(builder, kind, keys, found)):
                    for query in range(count):
                        at = builder.add(builder.add(starts[query], here), word(4 * (wider * place + part)))
                        x = load(builder, at, ir.IntType(32))
                        for half in halves:
                            n = query * len(halves) + half
                            totals[n] = step(builder, totals[n], x, numbers[half])
            loop.end(totals)
            for query in range(count):
                store_floats(builder, totals[query * len(halves) :][: len(halves)], out, out_stride, query)
            return context.get_dummy_value()

        return types.void(kind, keys, *(types.int64,) * 6), generate

    return scores


def _factors(builder: Any, kind: Any, stored: Any, vectors: Any) -> Any:
    """What each word of x is multiplied with, see `pallas_kernels.matmul.tile.factors`."""
    return [list(vectors)] if stored == types.float32 else factors(builder, kind, list(vectors))


def make_sums(count: int, groups: int) -> Any:
    """The jitted `sums(kind, stored, rows, offset, first, end, weights, stride, out, out_stride, ahead)`: `few_sums`.

    Args:
      count: of queries.
      groups: 32s of dimensions, which begin at `offset` bytes of a row.
    """
    vectors = range(groups * COLUMNS // LANES)

    @intrinsic
    def sums(
        typing: Any,
        kind: Any,
        stored: Any,
        rows: Any,
        offset: Any,
        first: Any,
        end: Any,
        weights: Any,
        stride: Any,
        out: Any,
        out_stride: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, rows, offset, first, end, weights, stride, out, out_stride, ahead = args
            step, paired = step_of(kind), stored != types.float32
            keys = 2 if paired else 1
            loop = Loop(builder, first, end, keys, [ZEROS] * count * len(vectors))
            totals = list(loop.values)
            starts = []
            for key in range(keys):
                place = builder.add(rows, builder.mul(builder.add(loop.index, word(key)), word(8)))
                starts.append(builder.add(load(builder, place, _WORD), offset))
                place = builder.add(ahead, builder.mul(loop.index, word(8)))
                for byte in range(0, groups * COLUMNS * (4 // keys), LINE):
                    fetch_line(builder, place, key, builder.add(offset, word(byte)))
            if paired:
                values = [value for group in range(groups) for value in _pairs(builder, *starts, group)]
            else:
                values = [load(builder, builder.add(starts[0], word(64 * v)), INTS) for v in vectors]
            here = builder.mul(loop.index, word(kind.bitwidth // 8))
            for part, numbers in enumerate(_factors(builder, kind, stored, values)):
                for query in range(count):
                    place = builder.add(weights, builder.mul(stride, word(query)))
                    weight = load(builder, builder.add(builder.add(place, here), word(4 * part)), ir.IntType(32))
                    for v in vectors:
                        n = query * len(vectors) + v
                        totals[n] = step(builder, totals[n], weight, numbers[v])
            loop.end(totals)
            for query in range(count):
                found = totals[query * len(vectors) : (query + 1) * len(vectors)]
                if paired:
                    found = [half for n in range(0, len(found), 2) for half in _in_order(builder, *found[n : n + 2])]
                store_floats(builder, found, out, out_stride, query)
            return context.get_dummy_value()

        return types.void(kind, stored, *(types.int64,) * 9), generate

    return sums


def _pairs(builder: Any, one: Any, two: Any, group: int) -> Any:
    """The 32 numbers of 16 bits at two addresses in pairs: of each 8 the first 4, then of each 8 the last 4."""
    kind = ir.VectorType(_BIT16, COLUMNS)
    one, two = (load(builder, builder.add(x, word(2 * COLUMNS * group)), kind) for x in (one, two))
    for first in (0, 4):
        order = [8 * lane + first + k + COLUMNS * side for lane in range(4) for k in range(4) for side in range(2)]
        yield builder.bitcast(_shuffle(builder, one, two, order), INTS)


def _in_order(builder: Any, one: Any, two: Any) -> Any:
    """Undoes the order of `_pairs` in their sums."""
    for first in (0, 2):
        order = [4 * lane + k + LANES * side for lane in (first, first + 1) for side in range(2) for k in range(4)]
        yield _shuffle(builder, one, two, order)


_scores1, _scores2, _scores3, _scores4 = map(make_scores, range(1, MOST_AT_ONCE + 1))
_sums1, _sums2, _sums3, _sums4 = (make_sums(count, GROUPS) for count in range(1, MOST_AT_ONCE + 1))
_narrow1, _narrow2, _narrow3, _narrow4 = (make_sums(count, 1) for count in range(1, MOST_AT_ONCE + 1))


@njit(**OPTIONS)
def few_scores(kind, keys, rows, first, end, size, x, count, out, out_stride, ahead):
    """Scores of `count` queries, at most MOST_AT_ONCE, for keys [first, end), in 32s, at addresses `rows`.

    Args:
      kind, keys: numbers of the types of queries and keys, as of x and w of `make_tile`.
      size: bytes of a row, in 64s.
      x: address of the queries, one after the other.
      out, out_stride: address of float32 scores of the first query, and bytes from query to query.
      ahead: address of addresses: the same bytes there are fetched meanwhile.
    """
    for j in range(first, end, KEYS):
        at, to = rows + 8 * j, out + 4 * j
        if count == 1:
            _scores1(kind, keys, at, size, x, to, out_stride, ahead + 8 * j)
        elif count == 2:
            _scores2(kind, keys, at, size, x, to, out_stride, ahead + 8 * j)
        elif count == 3:
            _scores3(kind, keys, at, size, x, to, out_stride, ahead + 8 * j)
        else:
            _scores4(kind, keys, at, size, x, to, out_stride, ahead + 8 * j)


@njit(**OPTIONS)
def few_sums(kind, stored, rows, first, end, size, weights, stride, count, out, out_stride, ahead):
    """Weighted sums of values [first, end), in 2s, at addresses `rows`, for `count` queries, at most MOST_AT_ONCE.

    Args:
      kind, stored: numbers of the types of weights and values, as of x and w of `make_tile`.
      size: bytes of a row, in 64s.
      weights, stride: address of the first query's, and bytes from query to query.
      out, out_stride: address of float32 sums of the first query, and bytes from query to query.
      ahead: address of addresses: the same bytes there are fetched meanwhile.
    """
    offset, wide = 0, GROUPS * COLUMNS * item_bytes(stored)
    while offset < size:
        to = out + 4 * offset // item_bytes(stored)
        if size - offset >= wide:
            if count == 1:
                _sums1(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            elif count == 2:
                _sums2(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            elif count == 3:
                _sums3(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            else:
                _sums4(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
        else:
            if count == 1:
                _narrow1(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            elif count == 2:
                _narrow2(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            elif count == 3:
                _narrow3(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
            else:
                _narrow4(kind, stored, rows, offset, first, end, weights, stride, to, out_stride, ahead)
        offset += wide
