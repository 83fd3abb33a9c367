"""The inner loop of a packed matrix product: a tile of rows times 32 columns, accumulated in registers."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

COLUMNS = 32

LINE = 64
_LANES = 16
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(ir.IntType(32), _LANES)
_WORD = ir.IntType(64)

_FEATURES = llvm.get_host_cpu_features()
HAS_BF16_DOT = bool(_FEATURES.get("avx512bf16"))
ROWS = (12, 8, 4, 1) if _FEATURES.get("avx512f") else (2, 1)
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
    vectors = range(COLUMNS // _LANES)

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
            step = _float_step if kind == types.float32 else _dot_step if has_dot else _widening_step
            starts = [builder.add(x, builder.mul(x_stride, _word(row))) for row in range(rows)]
            before = builder.block
            loop, after = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(_WORD)
            index.add_incoming(_word(0), before)
            sums = [[builder.phi(_FLOATS) for _ in vectors] for _ in range(rows)]
            place = builder.add(w, builder.mul(index, _word(4 * COLUMNS)))
            ahead = builder.add(fetch, builder.mul(index, fetch_stride))
            for line in range(0, 4 * COLUMNS, LINE):
                _prefetch(builder, builder.add(ahead, _word(line)))
            weights = [_load(builder, builder.add(place, _word(4 * _LANES * v)), _INTS) for v in vectors]
            ends = []
            for row in range(rows):
                pair = _load(builder, builder.add(starts[row], builder.mul(index, _word(4))), ir.IntType(32))
                ends.append([step(builder, sums[row][v], pair, weights[v]) for v in vectors])
            following = builder.add(index, _word(1))
            index.add_incoming(following, loop)
            for row in range(rows):
                for v in vectors:
                    sums[row][v].add_incoming(ir.Constant(_FLOATS, [0.0] * _LANES), before)
                    sums[row][v].add_incoming(ends[row][v], loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
            builder.position_at_end(after)
            for row in range(rows):
                for v in vectors:
                    place = builder.add(out, builder.add(builder.mul(out_stride, _word(row)), _word(4 * _LANES * v)))
                    builder.store(ends[row][v], builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(kind, *(types.int64,) * 8), generate

    return tile


def _prefetch(builder: Any, address: Any) -> None:
    """Asks for a cache line, which may lie outside of any array: nothing comes of it then."""
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(number, value) for value in (0, 2, 1)]  # to read, into the second cache, data
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _spread(builder: Any, x: Any) -> Any:
    """A number in every lane."""
    kind = ir.VectorType(x.type, _LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * _LANES))


def _float_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    x, w = builder.bitcast(_spread(builder, x), _FLOATS), builder.bitcast(w, _FLOATS)
    return _multiply_add(builder, x, w, total)


def _dot_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS, _INTS])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, _spread(builder, x), w])


def _widening_step(builder: Any, total: Any, x: Any, w: Any) -> Any:
    shift, mask = ir.Constant(_INTS, [16] * _LANES), ir.Constant(_INTS, [0xFFFF0000] * _LANES)
    x = _spread(builder, x)
    for half in (lambda v: builder.shl(v, shift), lambda v: builder.and_(v, mask)):
        total = _multiply_add(builder, builder.bitcast(half(x), _FLOATS), builder.bitcast(half(w), _FLOATS), total)
    return total


def _multiply_add(builder: Any, x: Any, w: Any, total: Any) -> Any:
    """One instruction where there is one."""
    return builder.fadd(builder.fmul(x, w, flags=("contract",)), total, flags=("contract",))
