"""The inner loop of a packed matrix product: a tile of rows times 32 columns, accumulated in registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from pallas_kernels.common.cpu_values import build_prefetch

COLUMNS = 32

LANES = 16
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
_WORD = ir.IntType(64)

FEATURES = llvm.get_host_cpu_features()
HAS_BF16_DOT = bool(FEATURES.get("avx512bf16"))
ROWS, PARTS = ((12, 8, 4, 1), 1) if FEATURES.get("avx512f") else ((4, 2, 1), 2)
"""Rows of the tiles there are, and parts of the columns, which are multiplied one after the other.

Accumulators are kept in registers, of which AVX-512 has 32 of 16 numbers, AVX2 16 of 8, NEON 32 of 4."""

llvm.initialize_native_asmparser()


def factor_kind(kind: Any) -> Any:
    """What rows of a kind (see `KINDS`) are multiplied as: float32 where bfloat16 has no instruction. Jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(factor_kind, inline="always")
def _factor_kind(kind):
    if kind == types.uint16 and not HAS_BF16_DOT:
        return lambda kind: np.float32(0)
    return lambda kind: kind


def make_tile(rows: int, *, adds: bool = False) -> Any:
    """The jitted `tile(kind, weight, x, x_stride, w, steps, out, out_stride, fetch, fetch_bytes)`; see below.

    All but `kind`, `weight` and `steps` are addresses or bytes.

    A step is 128 bytes of `w`, which lie one after the other: for each of 32 columns a float32 or two numbers of 16
    bits, the two of a column side by side if they are bfloat16, row after row if float16; and as many numbers of each
    row of x. `out` is float32. `kind` and `weight` are any numbers of the types of x and w: float32, uint16 for
    bfloat16, whose products are exact and summed as float32, and of w int16 for float16. Where w is narrower than x,
    its numbers are made float32 first, which is exact: the result has the bits of the product with the same numbers as
    float32. x of bfloat16 needs the processor's instruction (`factor_kind`). At every step memory is asked for
    `fetch_bytes` more from `fetch` on: what will be multiplied next.

    Args:
      rows: of the tile.
      adds: to what `out` holds, as if both were one product.
    """

    @intrinsic
    def tile(
        typing: Any,
        kind: Any,
        weight: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        steps: Any,
        out: Any,
        out_stride: Any,
        fetch: Any,
        fetch_bytes: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, x, x_stride, w, steps, out, out_stride, fetch, fetch_bytes = args
            starts = [builder.add(x, builder.mul(x_stride, word(row))) for row in range(rows)]
            fetch_bytes = builder.sdiv(fetch_bytes, word(PARTS))
            size = COLUMNS // LANES // PARTS
            for part in range(PARTS):
                vectors = range(size * part, size * (part + 1))
                to = builder.add(out, word(4 * LANES * vectors.start))
                first = [ZEROS] * rows * size
                if adds:
                    first = [
                        load(builder, _place(builder, to, out_stride, n // size, n % size), FLOATS)
                        for n in range(rows * size)
                    ]
                loop = Loop(builder, word(0), steps, 1, first)
                sums = _step(builder, kind, weight, vectors, starts, w, loop)
                ahead = builder.add(fetch, builder.mul(loop.index, fetch_bytes))
                build_prefetch(builder, ahead, 4 * COLUMNS // PARTS, cache=2)
                loop.end(sums)
                fetch = builder.add(fetch, builder.mul(steps, fetch_bytes))
                for row in range(rows):
                    store_floats(builder, sums[row * size :][:size], to, out_stride, row)
            return context.get_dummy_value()

        return types.void(kind, weight, *(types.int64,) * 8), generate

    return tile


def _step(builder: Any, kind: Any, weight: Any, vectors: range, starts: list[Any], w: Any, loop: Loop) -> list[Any]:
    """The loop's sums after a step, a row's vectors of columns side by side."""
    x_words, step = kind.bitwidth // weight.bitwidth, step_of(kind)
    sums = list(loop.values)
    place = builder.add(w, builder.mul(loop.index, word(4 * COLUMNS)))
    for index, weights in enumerate(loaded(builder, kind, weight, place, vectors)):
        here = builder.add(builder.mul(loop.index, word(4 * x_words)), word(4 * index))
        for row, start in enumerate(starts):
            pair = load(builder, builder.add(start, here), ir.IntType(32))
            for v, vector in enumerate(weights):
                n = row * len(vectors) + v
                sums[n] = step(builder, sums[n], pair, vector)
    return sums


def loaded(builder: Any, kind: Any, weight: Any, place: Any, vectors: range) -> Iterator[list[Any]]:
    """What each word of x in a step is multiplied with: 16 columns in a vector, float32 or pairs of bfloat16."""
    if weight == types.int16:
        wide = ir.VectorType(ir.HalfType(), LANES)
        for row in range(2):
            places = [builder.add(place, word(2 * (COLUMNS * row + LANES * v))) for v in vectors]
            yield [builder.bitcast(builder.fpext(load(builder, each, wide), FLOATS), INTS) for each in places]
        return
    words = [load(builder, builder.add(place, word(4 * LANES * v)), INTS) for v in vectors]
    yield from [words] if weight == types.float32 else factors(builder, kind, words)


def word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def store_floats(builder: Any, vectors: list[Any], out: Any, stride: Any, row: int) -> None:
    """Vectors of float32, one after the other, to a row of an array at address `out`; `stride` is bytes to the next."""
    for v, vector in enumerate(vectors):
        place = _place(builder, out, stride, row, v)
        builder.store(vector, builder.inttoptr(place, FLOATS.as_pointer()), align=4)


def _place(builder: Any, out: Any, stride: Any, row: int, vector: int) -> Any:
    return builder.add(out, builder.add(builder.mul(stride, word(row)), word(4 * LANES * vector)))


def spread(builder: Any, x: Any, lanes: int = LANES) -> Any:
    """A number in every lane."""
    kind = ir.VectorType(x.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order)


def step_of(kind: Any) -> Any:
    """`step(builder, total, x, w)` for a `kind` of `make_tile`: total + x * w in every lane, x the same in all."""
    return _float_step if kind == types.float32 else dot_step


def _float_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    x, w = builder.bitcast(spread(builder, x), FLOATS), builder.bitcast(w, FLOATS)
    return multiply_add(builder, x, w, total)


def dot_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, spread(builder, x), w])


def factors(builder: Any, kind: Any, words: list[Any]) -> Iterator[list[Any]]:
    """What words of x are multiplied with: vectors of pairs of bfloat16, or float32 of one, then of the other."""
    yield from [words] if kind == types.uint16 else ([half(builder, each) for each in words] for half in _HALVES)


def _first(builder: Any, pairs: Any) -> Any:
    return builder.shl(pairs, ir.Constant(INTS, [16] * LANES))


def _second(builder: Any, pairs: Any) -> Any:
    return builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES))


_HALVES = (_first, _second)
"""The bits of float32 of the first and the second of pairs of bfloat16."""


def multiply_add(builder: Any, x: Any, w: Any, total: Any) -> Any:
    """One instruction where there is one."""
    return builder.fadd(builder.fmul(x, w, flags=("contract",)), total, flags=("contract",))


class Loop:
    """`for index in range(first, end, step)`, at least once, with values that are carried along."""

    def __init__(self, builder: Any, first: Any, end: Any, step: int, carried: list[Any]) -> None:
        self._builder, self._end, self._step = builder, end, step
        before = builder.block
        self._body, self._after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(_WORD)
        self.index.add_incoming(first, before)
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, before)

    def end(self, values: list[Any]) -> None:
        builder = self._builder
        following = builder.add(self.index, word(self._step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, self._after)
        builder.position_at_end(self._after)
