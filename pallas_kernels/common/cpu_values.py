"""Numbers in jitted code for CPUs: where they lie in memory, and float32 from and to what is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},  # NaN and infinity are not assumed away
    "error_model": "numpy",
    "boundscheck": False,
}
"""How kernels are compiled."""

INLINE = OPTIONS | {"inline": "always"}

LINE = 64
"""Bytes of a cache line."""


def _pointer(kind: Any) -> Any:
    @intrinsic
    def cast(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind).as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return cast


pointer_i64 = _pointer(types.int64)
pointer_i32 = _pointer(types.int32)
pointer_f32 = _pointer(types.float32)
pointer_u16 = _pointer(types.uint16)


@intrinsic
def bits_to_float(typing: Any, x: Any) -> Any:
    """The float32 that has these bits, uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def build_prefetch(builder: Any, address: Any, size: int, *, cache: int) -> None:
    """Asks for the cache lines of `size` bytes, which may lie outside of any array: nothing comes of it then.

    Args:
      cache: the nearest that they shall be in, 1 or 2.
    """
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(number, value) for value in (0, 4 - cache, 1)]  # to read, data
    for line in range(0, size, LINE):
        place = builder.add(address, ir.Constant(ir.IntType(64), line))
        builder.call(function, [builder.inttoptr(place, pointer), *options])


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Asks for the cache line at an address, which is needed soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build_prefetch(builder, args[0], LINE, cache=2)
        return context.get_dummy_value()

    return types.void(types.int64), generate


KINDS = {"float32": np.float32(0), "bfloat16": np.uint16(0)}
"""A number of the type that each dtype is stored as, which tells it to jitted code."""


def array_at(kind: Any, address: Any, shape: Any) -> Any:
    """The array of `kind`'s type (see `KINDS`) at an address. For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(array_at, inline="always")
def _array_at(kind, address, shape):
    if kind == types.uint16:
        return lambda kind, address, shape: carray(pointer_u16(address), shape)
    return lambda kind, address, shape: carray(pointer_f32(address), shape)


@intrinsic
def _bfloat16_bits(typing: Any, x: Any) -> Any:
    """The nearest bfloat16's bits, uint16. In 32 bits throughout, where numba's own arithmetic would take 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        nearest = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, word(0x7FC0), nearest), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _from_bfloat16_bits(typing: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), generate


def item_bytes(kind: Any) -> int:
    """Size of a number of `kind`'s type (see `KINDS`). For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(item_bytes, inline="always")
def _item_bytes(kind):
    size = kind.bitwidth // 8
    return lambda kind: size


def load(x: Any) -> Any:
    """A stored number as float32; bfloat16 is stored as its bits, uint16. For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(load, inline="always")
def _load(x):
    if x == types.uint16:
        return lambda x: _from_bfloat16_bits(x)
    return lambda x: x


def store(array: Any, place: Any, x: Any) -> None:
    """Writes a float32 to a place of a float32 array, or of a uint16 one as the nearest bfloat16. For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(store, inline="always")
def _store(array, place, x):
    if array.dtype != types.uint16:

        def write(array, place, x):
            array[place] = x

        return write

    def round_and_write(array, place, x):
        array[place] = _bfloat16_bits(x)

    return round_and_write


def rounded(kind: Any, x: Any) -> Any:
    """A float32 as it would come back from an array of `kind`'s type (see `KINDS`). For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(rounded, inline="always")
def _rounded(kind, x):
    if kind == types.uint16:
        return lambda kind, x: _from_bfloat16_bits(_bfloat16_bits(x))
    return lambda kind, x: x


def store_as(kind: Any, array: Any, place: Any, x: Any) -> None:
    """`store` of a number that is rounded to `kind`'s type (see `KINDS`) whatever the array's. For jitted code."""
    raise NotImplementedError("only in jitted code")


@overload(store_as, inline="always")
def _store_as(kind, array, place, x):
    if array.dtype == kind:
        return lambda kind, array, place, x: store(array, place, x)
    return lambda kind, array, place, x: store(array, place, rounded(kind, x))
