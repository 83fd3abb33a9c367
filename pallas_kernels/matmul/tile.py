"""The inner loop of a packed matrix product: a tile of rows times 32 columns, accumulated in registers."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.common.cpu_values import build_prefetch

COLUMNS = 32

LANES = 16
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_WORD = ir.IntType(64)

FEATURES = llvm.get_host_cpu_features()
HAS_BF16_DOT = bool(FEATURES.get("avx512bf16"))
ROWS = (12, 8, 4, 1) if FEATURES.get("avx512f") else (2, 1)
"""Rows of the tiles there are: as many as keep accumulators in registers."""

llvm.initialize_native_asmparser()


def make_tile(rows: int, *, has_dot: bool = HAS_BF16_DOT) -> Any:
    """The jitted `tile(kind, x, x_stride, w, steps, out, out_stride, fetch, fetch_stride)`; see below.

    All but `kind` and `steps` are addresses or bytes.

    A step is one float32 or two bfloat16 of each row, and 32 floats or pairs of `w`, which lie one after the other.
    `out` is float32. `kind` is any number of x's type: float32, or uint16 for bfloat16, whose products are exact and
    summed as float32. At every step memory is asked for two cache lines at `fetch`, which then moves on by
    `fetch_stride`: what will be multiplied next.

    Args:
      rows: of the tile.
      has_dot: whether the processor has an instruction that adds two products of bfloat16 to a float32.
    """
    vectors = range(COLUMNS // LANES)

    @intrinsic
    def tile(
        typing: Any,
        kind: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        steps: Any,
        out: Any,
        out_stride: Any,
        fetch: Any,
        fetch_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, x, x_stride, w, steps, out, out_stride, fetch, fetch_stride = args
            step = _float_step if kind == types.float32 else dot_step if has_dot else _widening_step
            starts = [builder.add(x, builder.mul(x_stride, word(row))) for row in range(rows)]
            before = builder.block
            loop, after = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(_WORD)
            index.add_incoming(word(0), before)
            sums = [[builder.phi(FLOATS) for _ in vectors] for _ in range(rows)]
            place = builder.add(w, builder.mul(index, word(4 * COLUMNS)))
            ahead = builder.add(fetch, builder.mul(index, fetch_stride))
            build_prefetch(builder, ahead, 4 * COLUMNS, cache=2)
            weights = [load(builder, builder.add(place, word(4 * LANES * v)), INTS) for v in vectors]
            ends = []
            for row in range(rows):
                pair = load(builder, builder.add(starts[row], builder.mul(index, word(4))), ir.IntType(32))
                ends.append([step(builder, sums[row][v], pair, weights[v]) for v in vectors])
            following = builder.add(index, word(1))
            index.add_incoming(following, loop)
            for row in range(rows):
                for v in vectors:
                    sums[row][v].add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
                    sums[row][v].add_incoming(ends[row][v], loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
            builder.position_at_end(after)
            for row in range(rows):
                for v in vectors:
                    place = builder.add(out, builder.add(builder.mul(out_stride, word(row)), word(4 * LANES * v)))
                    builder.store(ends[row][v], builder.inttoptr(place, FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(kind, *(types.int64,) * 8), generate

    return tile


def word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def spread(builder: Any, x: Any) -> Any:
    """A number in every lane."""
    kind = ir.VectorType(x.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def _float_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    x, w = builder.bitcast(spread(builder, x), FLOATS), builder.bitcast(w, FLOATS)
    return multiply_add(builder, x, w, total)


def dot_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, spread(builder, x), w])


def _widening_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    shift, mask = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [0xFFFF0000] * LANES)
    x = spread(builder, x)
    for half in (lambda v: builder.shl(v, shift), lambda v: builder.and_(v, mask)):
        total = multiply_add(builder, builder.bitcast(half(x), FLOATS), builder.bitcast(half(w), FLOATS), total)
    return total


def multiply_add(builder: Any, x: Any, w: Any, total: Any) -> Any:
    """One instruction where there is one."""
    return builder.fadd(builder.fmul(x, w, flags=("contract",)), total, flags=("contract",))
