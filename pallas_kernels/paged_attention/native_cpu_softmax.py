"""A softmax that is renormalised block by block, in vectors of 16, whose sums have one order.

After Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.matmul.tile import FLOATS, INTS, LANES, ZEROS, Loop, load, multiply_add, spread, word

KEY_BLOCK = 128
"""Keys whose scores are held at once."""

NEVER = -1e30
"""Score of a key that is not seen."""
STATE = 3
"""Numbers of a query's state, float32: the largest score so far, the sum of exponentials, and the factor that the last
block gave to what was summed before it."""

_LOWEST = -87.0
_PLAIN = ("nsz",)  # numba would give flags that allow another order to what has none


def _all(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _exp(builder: Any, x: Any) -> Any:
    """exp(x) of x <= 0 to 1e-7; 0 below -87. After Cephes' expf."""
    low = builder.fcmp_ordered("<", x, _all(_LOWEST))
    x = builder.select(low, _all(_LOWEST), x)
    shift = 1.5 * 2**23  # adding it rounds to an integer, which is then the low bits
    shifted = multiply_add(builder, x, _all(1.4426950408889634), _all(shift))
    n = builder.fsub(shifted, _all(shift), flags=_PLAIN)
    f = multiply_add(builder, n, _all(-0.693359375), x)
    f = multiply_add(builder, n, _all(2.12194440e-4), f)
    p = _all(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = multiply_add(builder, p, f, _all(factor))
    power = builder.add(builder.shl(builder.bitcast(shifted, INTS), _ints(23)), _ints(127 << 23))
    result = builder.fmul(p, builder.bitcast(power, FLOATS), flags=_PLAIN)
    return builder.select(low, ZEROS, result)


def _reduce(builder: Any, combine: Any, vectors: list[Any]) -> Any:
    """In every lane what combines all lanes of all vectors."""
    while len(vectors) > 1:
        vectors = [combine(*vectors[n : n + 2]) for n in range(0, len(vectors), 2)]
    (one,) = vectors
    for step in (8, 4, 2, 1):
        turned = builder.shuffle_vector(one, one, ir.Constant(INTS, [lane ^ step for lane in range(LANES)]))
        one = combine(one, turned)
    return one


@intrinsic
def soften(
    typing: Any, kind: Any, rounding: Any, scores: Any, weights: Any, state: Any, scale: Any, start: Any, stop: Any
) -> Any:
    """Makes weights of a block's scores, and takes them into a query's state.

    Args:
      kind, rounding: what the weights are stored as and rounded to, see `pallas_kernels.common.cpu_values.KINDS`.
      scores, weights: addresses of float32[KEY_BLOCK] and of as many numbers of `kind`.
      state: address, see `STATE`.
      scale: factor of the scores.
      start, stop: of the keys that are seen, one at least.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, scores, weights, state, scale, start, stop = args
        number = ir.FloatType()

        def larger(x: Any, top: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, top), x, top)

        def plus(one: Any, two: Any) -> Any:
            return builder.fadd(one, two, flags=_PLAIN)

        scale = spread(builder, scale)
        start, stop = (spread(builder, builder.trunc(x, ir.IntType(32))) for x in (start, stop))
        rows = []
        for first in range(0, KEY_BLOCK, LANES):
            x = load(builder, builder.add(scores, word(4 * first)), FLOATS)
            lanes = ir.Constant(INTS, [first + lane for lane in range(LANES)])
            seen = builder.and_(builder.icmp_signed(">=", lanes, start), builder.icmp_signed("<", lanes, stop))
            rows.append(builder.select(seen, builder.fmul(x, scale, flags=_PLAIN), _all(NEVER)))
        old, total = (spread(builder, load(builder, builder.add(state, word(n)), number)) for n in (0, 4))
        top = larger(_reduce(builder, larger, rows), old)
        keep = _exp(builder, builder.fsub(old, top, flags=_PLAIN))
        rows = [_exp(builder, builder.fsub(x, top, flags=_PLAIN)) for x in rows]
        total = multiply_add(builder, total, keep, _reduce(builder, plus, rows))
        for n, value in enumerate((top, total, keep)):
            place = builder.inttoptr(builder.add(state, word(4 * n)), number.as_pointer())
            builder.store(builder.extract_element(value, ir.IntType(32)(0)), place, align=4)
        for n, x in enumerate(rows):
            stored = x if rounding == types.float32 else _to_bfloat16(builder, x)
            if kind != rounding:
                stored = builder.shl(builder.zext(stored, INTS), _ints(16))
            size = 4 if kind == types.float32 else 2
            place = builder.add(weights, word(size * LANES * n))
            builder.store(stored, builder.inttoptr(place, stored.type.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.void(kind, rounding, *(types.int64,) * 3, types.float32, types.int64, types.int64), generate


def _to_bfloat16(builder: Any, x: Any) -> Any:
    """Bits of the nearest bfloat16 of numbers that are not NaN."""
    bits = builder.bitcast(x, INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    nearest = builder.lshr(builder.add(builder.add(bits, _ints(0x7FFF)), odd), _ints(16))
    return builder.trunc(nearest, ir.VectorType(ir.IntType(16), LANES))


@intrinsic
def renew(typing: Any, sums: Any, keep: Any, added: Any, size: Any) -> Any:
    """sums = sums * keep + added: `size` bytes, in 64s, of float32 at two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, keep, added, size = args
        keep = spread(builder, keep)
        loop = Loop(builder, word(0), size, 64, [])
        place = builder.add(sums, loop.index)
        x = multiply_add(
            builder, load(builder, place, FLOATS), keep, load(builder, builder.add(added, loop.index), FLOATS)
        )
        builder.store(x, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
        loop.end([])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate
