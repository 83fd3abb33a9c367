"""The inner loop of a product with a quantised matrix: a tile of rows times 32 columns.

The integers of a block become bfloat16 (exactly) or float32 in registers, are multiplied with the rows and summed as
float32 from zero; then `scale * sum` and `minimum * sum of the row's block` are added to the row's totals in memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, overload_attribute, register_model, typeof_impl

from pallas_kernels.common.cpu_values import build_prefetch
from pallas_kernels.matmul.quantised import QuantisedForm, bfloat16_bits
from pallas_kernels.matmul.tile import (
    COLUMNS,
    FEATURES,
    FLOATS,
    HAS_BF16_DOT,
    INTS,
    LANES,
    dot_step,
    load,
    multiply_add,
    spread,
    word,
)

HAS_DECODING = HAS_BF16_DOT and bool(FEATURES.get("avx512bw"))
"""Whether integers can become bfloat16 in registers, and be multiplied so."""

_VECTORS = range(COLUMNS // LANES)
_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_WORDS = ir.VectorType(_I16, 2 * LANES)
_OUT_STRIDE = 4 * COLUMNS
_AHEAD = 12
"""Blocks by which memory is asked for before it is needed: the processor alone is late when many rows keep it busy."""


class FormType(types.Type):
    """The type of a `QuantisedForm` in jitted code: each form is a type of its own."""

    def __init__(self, form: QuantisedForm) -> None:
        self.form = form
        super().__init__(name=repr(form))


@typeof_impl.register(QuantisedForm)
def _typeof(form: QuantisedForm, _: Any) -> FormType:
    return FormType(form)


register_model(FormType)(models.OpaqueModel)


@lower_constant(FormType)
def _constant(context: Any, *_: Any) -> Any:
    return context.get_dummy_value()


def _expose(name: str) -> None:
    @overload_attribute(FormType, name, inline="always")
    def attribute(form):
        value = getattr(form.form, name)
        return lambda form: value


for _name in ("block", "has_minimum", "integer_bytes", "scale_bytes"):
    _expose(_name)


@intrinsic
def block_sum(typing: Any, kind: Any, form: Any, address: Any) -> Any:
    """The sum of a block of a row at an address; `kind` and `form` are as for a tile."""
    block = form.form.block

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if kind == types.float32:
            parts = [load(builder, builder.add(args[2], word(4 * n)), FLOATS) for n in range(0, block, LANES)]
        else:
            halves = ir.VectorType(_I16, LANES)
            found = [load(builder, builder.add(args[2], word(2 * n)), halves) for n in range(0, block, LANES)]
            parts = [_widened(builder, builder.zext(each, INTS)) for each in found]
        total = parts[0] if len(parts) == 1 else builder.fadd(*parts)
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            low, high = (ir.Constant(ir.VectorType(_I32, lanes), [*range(n, n + lanes)]) for n in (0, lanes))
            none = ir.Constant(total.type, ir.Undefined)
            total = builder.fadd(*(builder.shuffle_vector(total, none, part) for part in (low, high)))
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return types.float32(kind, form, types.int64), generate


def _widened(builder: Any, words: Any) -> Any:
    """float32 of the bfloat16 in the low half of each word."""
    return builder.bitcast(builder.shl(words, ir.Constant(INTS, [16] * LANES)), FLOATS)


def make_quantised_tile(rows: int, *, has_decoding: bool = HAS_DECODING) -> Any:
    """The jitted `tile(kind, form, x, x_stride, sums, sums_stride, integers, scales, blocks, out)`.

    All but the first two are addresses, bytes, and the number of blocks. `kind` is as for `make_tile`, `form` a
    `QuantisedForm`. `sums` are float32 of each row's blocks, read if there are minima. `out` is float32[rows, 32].

    Args:
      rows: of the tile.
      has_decoding: see `HAS_DECODING`.
    """

    @intrinsic
    def tile(typing: Any, kind: Any, form: Any, x: Any, x_stride: Any, sums: Any, sums_stride: Any, integers: Any,
             scales: Any, blocks: Any, out: Any) -> Any:  # fmt: skip
        form_value = form.form

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if kind == types.float32:
                steps: Any = _FloatSteps(builder, form_value, 4)
            elif has_decoding:
                steps = _DotSteps(builder, form_value)
            else:
                steps = _FloatSteps(builder, form_value, 2)
            _generate(builder, rows, form_value, steps, args[2:])
            return context.get_dummy_value()

        return types.void(kind, form, *(types.int64,) * 8), generate

    return tile


def _generate(builder: Any, rows: int, form: QuantisedForm, steps: Any, args: Any) -> None:
    """The loops over blocks and, in a block, over rows of words."""
    x, x_stride, sums, sums_stride, integers, scales, blocks, out = args
    x_starts = [builder.add(x, builder.mul(x_stride, word(row))) for row in range(rows)]
    sum_starts = [builder.add(sums, builder.mul(sums_stride, word(row))) for row in range(rows)]
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    places = [[word(_OUT_STRIDE * row + 4 * LANES * v) for v in _VECTORS] for row in range(rows)]
    for row in range(rows):
        for v in _VECTORS:
            _store(builder, builder.add(out, places[row][v]), zero)
    word_rows = form.block // steps.values
    before = builder.block
    over_blocks, over_words, block_end, after = map(
        builder.append_basic_block, ("blocks", "words", "block_end", "done")
    )
    builder.branch(over_blocks)

    builder.position_at_end(over_blocks)
    block = builder.phi(word(0).type)
    block.add_incoming(word(0), before)
    block_integers = builder.add(integers, builder.mul(block, word(form.integer_bytes)))
    block_x = builder.mul(block, word(form.block * steps.x_bytes))
    builder.branch(over_words)

    builder.position_at_end(over_words)
    index = builder.phi(word(0).type)
    index.add_incoming(word(0), over_blocks)
    found = [[builder.phi(FLOATS) for _ in _VECTORS] for _ in range(rows)]
    place = builder.add(block_integers, builder.mul(index, word(form.integer_bytes // word_rows)))
    here = builder.add(block_x, builder.mul(index, word(steps.values * steps.x_bytes)))
    build_prefetch(
        builder, builder.add(place, word(_AHEAD * form.integer_bytes)), form.integer_bytes // word_rows, cache=1
    )
    starts = [builder.add(start, here) for start in x_starts]
    ends = steps.add(found, place, starts)
    following = builder.add(index, word(1))
    index.add_incoming(following, over_words)
    for row in range(rows):
        for v in _VECTORS:
            found[row][v].add_incoming(zero, over_blocks)
            found[row][v].add_incoming(ends[row][v], over_words)
    builder.cbranch(builder.icmp_signed("<", following, word(word_rows)), over_words, block_end)

    builder.position_at_end(block_end)
    block_scales = builder.add(scales, builder.mul(block, word(form.scale_bytes)))
    build_prefetch(builder, builder.add(block_scales, word(_AHEAD * form.scale_bytes)), form.scale_bytes, cache=1)
    factors = [
        [_load_scales(builder, form, block_scales, COLUMNS * part + LANES * v) for v in _VECTORS]
        for part in range(1 + form.has_minimum)
    ]
    for row in range(rows):
        row_sum = None
        if form.has_minimum:
            address = builder.add(sum_starts[row], builder.mul(block, word(4)))
            row_sum = spread(builder, load(builder, address, ir.FloatType()))
        for v in _VECTORS:
            address = builder.add(out, places[row][v])
            total = multiply_add(builder, factors[0][v], ends[row][v], load(builder, address, FLOATS))
            if form.has_minimum:
                total = multiply_add(builder, factors[1][v], row_sum, total)
            _store(builder, address, total)
    next_block = builder.add(block, word(1))
    block.add_incoming(next_block, block_end)
    builder.cbranch(builder.icmp_signed("<", next_block, blocks), over_blocks, after)
    builder.position_at_end(after)


class _DotSteps:
    """Pairs of bfloat16, by the instruction for them. 4 bits: 8 values of a column at a time; 8 bits: 2."""

    x_bytes = 2

    def __init__(self, builder: Any, form: QuantisedForm) -> None:
        self._builder, self._form = builder, form
        self.values = 8
        # Twice, since the instruction looks at 5 bits.
        numbers = [n if form.has_minimum or n < 8 else n - 16 for n in range(16)] * 2
        self._table = ir.Constant(_WORDS, [bfloat16_bits(n) for n in numbers])

    def add(self, sums: Any, place: Any, starts: Any) -> Any:
        """`sums` with the products of the words at an address and the rows at others."""
        builder, ends = self._builder, sums
        decoded = self._nibbles(place) if self._form.bits == 4 else self._bytes(place)
        for step, weights in enumerate(decoded):
            following = []
            for row, start in enumerate(starts):
                pair = load(builder, builder.add(start, word(4 * step)), _I32)
                following.append([dot_step(builder, ends[row][v], pair, weights[v]) for v in _VECTORS])
            ends = following
        return ends

    def _nibbles(self, place: Any) -> Any:
        builder = self._builder
        look_up = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORDS, [_WORDS, _WORDS]), "llvm.x86.avx512.permvar.hi.512"
        )
        words = [load(builder, builder.add(place, word(4 * LANES * v)), _WORDS) for v in _VECTORS]
        for step in range(4):
            shift = ir.Constant(_WORDS, [4 * step] * 2 * LANES)
            picked = [builder.call(look_up, [self._table, builder.lshr(each, shift)]) for each in words]
            yield [builder.bitcast(each, INTS) for each in picked]

    def _bytes(self, place: Any) -> Any:
        builder, half = self._builder, ir.VectorType(_I8, LANES)
        join = ir.InlineAsm(ir.FunctionType(INTS, [FLOATS, FLOATS]), "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
        for step in range(4):
            weights = []
            for v in _VECTORS:
                at = [builder.add(place, word(2 * COLUMNS * step + 2 * LANES * v + LANES * h)) for h in (0, 1)]
                halves = [builder.sitofp(builder.sext(load(builder, a, half), INTS), FLOATS) for a in at]
                weights.append(builder.call(join, halves))
            yield weights


class _FloatSteps:
    """Float32 products, of float32 or widened bfloat16 rows."""

    def __init__(self, builder: Any, form: QuantisedForm, x_bytes: int) -> None:
        self._builder, self._form, self.x_bytes = builder, form, x_bytes
        self.values = 8 if form.bits == 4 else 2

    def add(self, sums: Any, place: Any, starts: Any) -> Any:
        """`sums` with the products of the words at an address and the rows at others."""
        builder, form, ends = self._builder, self._form, sums
        kind = INTS if form.bits == 4 else ir.VectorType(_I16, LANES)
        size = 4 if form.bits == 4 else 2
        words = [load(builder, builder.add(place, word(size * LANES * v)), kind) for v in _VECTORS]
        words = [builder.zext(each, INTS) for each in words] if form.bits == 8 else words
        for value in range(self.values):
            # Even values are in the low half of a word, odd ones in the high half.
            low = (16 if form.bits == 4 else 8) * (value % 2) + form.bits * (value // 2)
            weights = [self._number(each, low) for each in words]
            following = []
            for row, start in enumerate(starts):
                x = self._x(builder.add(start, word(self.x_bytes * value)))
                following.append([multiply_add(builder, x, weights[v], ends[row][v]) for v in _VECTORS])
            ends = following
        return ends

    def _number(self, words: Any, low: int) -> Any:
        """float32 of the bits of each word from `low` on."""
        builder, bits = self._builder, self._form.bits
        if bits == 4 and self._form.has_minimum:
            moved = builder.lshr(words, ir.Constant(INTS, [low] * LANES))
            return builder.sitofp(builder.and_(moved, ir.Constant(INTS, [15] * LANES)), FLOATS)
        moved = builder.shl(words, ir.Constant(INTS, [32 - bits - low] * LANES))
        return builder.sitofp(builder.ashr(moved, ir.Constant(INTS, [32 - bits] * LANES)), FLOATS)

    def _x(self, address: Any) -> Any:
        builder = self._builder
        if self.x_bytes == 4:
            return spread(builder, load(builder, address, ir.FloatType()))
        bits = builder.shl(builder.zext(load(builder, address, _I16), _I32), ir.Constant(_I32, 16))
        return spread(builder, builder.bitcast(bits, ir.FloatType()))


def _load_scales(builder: Any, form: QuantisedForm, address: Any, index: int) -> Any:
    """16 scales or minima as float32."""
    if form.scale == "float32":
        return load(builder, builder.add(address, word(4 * index)), FLOATS)
    halves = load(builder, builder.add(address, word(2 * index)), ir.VectorType(ir.HalfType(), LANES))
    return builder.fpext(halves, FLOATS)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)
