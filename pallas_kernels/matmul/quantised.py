"""Matrices of affine blocks: small integers with a scale, and for some formats a minimum, per block and column.

A block is 16 or 32 values of a column, one below the other; a value is `scale * integer + minimum`. Nothing is rounded
here but by `quantise`: integers and scales are those that a file holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

GROUP = 32
"""Columns that lie together in a packed matrix."""

BLOCK_SIZES = (16, 32)
_WORDS = {8: np.dtype(np.int8), 4: np.dtype(np.uint16)}
_PER_WORD = {8: 1, 4: 4}
_LEAST_SCALE = 2.0**-24
"""The least float16: what is scaled by less is off by less than half of it."""


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """How a quantised matrix is stored.

    Attributes:
      bits: of an integer, 4 or 8.
      block: values of a block, 16 or 32.
      has_minimum: integers are then 0 to 15, or -128 to 127; without, signed.
      scale: "float16" or "float32", the dtype of scales and minima.
    """

    bits: int
    block: int = 32
    has_minimum: bool = False
    scale: str = "float16"

    @property
    def name(self) -> str:
        """For the names of calls."""
        return f"{self.bits}.{self.block}.{'minimum' if self.has_minimum else 'symmetric'}.{self.scale}"

    @property
    def integer_bytes(self) -> int:
        """Of a block of a group's columns."""
        return self.block * GROUP * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of the scales and minima of a block of a group's columns."""
        return (1 + self.has_minimum) * GROUP * np.dtype(self.scale).itemsize


class Blocks(NamedTuple):
    """Quantised columns, as files have them.

    Attributes:
      integers: int8[out, in].
      scales: float16 or float32 [out, in / block].
      minima: of the scales' shape and dtype; None: zeros.
    """

    integers: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    minima: np.ndarray[Any, Any] | None = None


class QuantisedMatrix(NamedTuple):
    """A matrix [in, out] packed for products on CPU; several of one form may be stacked in front.

    Attributes:
      integers: 4 bits: uint16[out / 32, in / block, block / 8, 32, 2], a word is rows 0, 2, 4, 6 of eight (or 1, 3, 5,
        7, the second of the pair), lowest bits first, in two's complement if there are no minima. 8 bits:
        int8[out / 32, in / block, block / 2, 32, 2].
      scales: [out / 32, in / block, 1, 32]; [..., 2, 32] with the minima.
    """

    integers: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out) of the matrix."""
        groups, blocks = self.integers.shape[-5:-3]
        return blocks * form_of(self).block, groups * GROUP


def form_of(matrix: QuantisedMatrix) -> QuantisedForm:
    """The form of a matrix, which its dtypes and shapes tell."""
    bits = 8 if matrix.integers.dtype == _WORDS[8] else 4
    block = 2 * _PER_WORD[bits] * matrix.integers.shape[-3]
    return QuantisedForm(bits, block, matrix.scales.shape[-2] == 2, jnp.dtype(matrix.scales.dtype).name)


def can_quantise(shape: tuple[int, int], block: int = 32) -> bool:
    """Whether a matrix [in, out] can be of such blocks: `in` in blocks, `out` in 32s."""
    return block in BLOCK_SIZES and shape[0] % block == 0 and shape[1] % GROUP == 0


def abstract_quantised(shape: tuple[int, int], form: QuantisedForm) -> QuantisedMatrix:
    """Shapes and dtypes of a matrix [in, out] in a form."""
    lead, per_word = (shape[1] // GROUP, shape[0] // form.block), _PER_WORD[form.bits]
    return QuantisedMatrix(
        jax.ShapeDtypeStruct((*lead, form.block // (2 * per_word), GROUP, 2), _WORDS[form.bits]),
        jax.ShapeDtypeStruct((*lead, 1 + form.has_minimum, GROUP), np.dtype(form.scale)),
    )


def pack_quantised(blocks: Blocks, bits: int) -> QuantisedMatrix:
    """Packs columns, as numpy arrays.

    Args:
      blocks: integers that fit in `bits`: 8: -128 to 127; 4: -8 to 7, or 0 to 15 with minima.

    Raises:
      ValueError: shapes that cannot be packed, or integers that do not fit.
    """
    integers, scales, minima = blocks
    out_size, in_size = integers.shape
    block = in_size // max(scales.shape[1], 1)
    if not can_quantise((in_size, out_size), block) or scales.shape != (out_size, in_size // block):
        raise ValueError(
            f"integers {list(integers.shape)} with scales {list(scales.shape)} cannot be packed: they must be [out, in]"
            f" with out in {GROUP}s, in blocks of {' or '.join(map(str, BLOCK_SIZES))}"
        )
    low, high = (-128, 127) if bits == 8 else (0, 15) if minima is not None else (-8, 7)
    if integers.min() < low or integers.max() > high:
        raise ValueError(f"integers of {bits} bits must be {low} to {high}, not {integers.min()} to {integers.max()}")
    per_word = _PER_WORD[bits]
    # [group, column, block, word row, step of the word, of the pair]
    grouped = integers.reshape(out_size // GROUP, GROUP, in_size // block, -1, per_word, 2)
    if bits == 8:
        words = grouped[:, :, :, :, 0]
    else:
        nibbles = grouped.view(np.uint8).astype(np.uint16) & np.uint16(15)
        words = np.bitwise_or.reduce(nibbles << np.arange(0, 16, 4, np.uint16)[:, None], axis=4)
    kept = scales[:, :, None] if minima is None else np.stack([scales, minima], axis=2)
    return QuantisedMatrix(
        np.ascontiguousarray(words.transpose(0, 2, 3, 1, 4)),
        np.ascontiguousarray(kept.reshape(-1, GROUP, *kept.shape[1:]).transpose(0, 2, 3, 1)),
    )


def quantise(columns: np.ndarray[Any, Any], bits: int) -> Blocks:
    """Quantises columns [out, in] by blocks of 32, to the nearest integers.

    8 bits are symmetric, the largest of a block is 127; 4 bits run from the block's least value, 0, to its largest, 15.

    Raises:
      ValueError: a number is not finite, or too large for a float16 scale.
    """
    wide = np.asarray(columns, np.float32).reshape(columns.shape[0], -1, 32)
    largest = np.finfo(np.float16).max
    if not (np.abs(wide) <= largest).all():
        raise ValueError(f"weights must be finite and at most {largest:g} to be quantised")
    if bits == 8:
        low, steps = np.zeros(wide.shape[:2], np.float16), np.abs(wide).max(-1) / 127
    else:
        low = wide.min(-1).astype(np.float16)
        steps = (wide.max(-1) - low.astype(np.float32)) / 15
    scales = np.maximum(steps, _LEAST_SCALE).astype(np.float16)
    # Of the scales as they are kept, so that their rounding costs nothing.
    found = np.rint((wide - low.astype(np.float32)[..., None]) / scales.astype(np.float32)[..., None])
    found = found.clip(-127, 127) if bits == 8 else found.clip(0, 15)
    return Blocks(found.astype(np.int8).reshape(columns.shape), scales, None if bits == 8 else low)


def dequantised_columns(matrix: QuantisedMatrix, columns: jax.Array) -> jax.Array:
    """float32[N, in]: columns int32[N] of a matrix."""
    form, group, column = form_of(matrix), columns // GROUP, columns % GROUP
    words = matrix.integers[group, :, :, column, :]  # [N, blocks, word rows, 2]
    if form.bits == 4:
        shifts = np.arange(0, 16, 4, np.uint16)[:, None]
        nibbles = ((words[:, :, :, None] >> shifts) & np.uint16(15)).astype(jnp.int32)
        words = nibbles if form.has_minimum else (nibbles ^ 8) - 8
    integers = words.reshape(columns.shape[0], -1, form.block).astype(jnp.float32)
    scales = matrix.scales[group, :, :, column].astype(jnp.float32)  # [N, blocks, 1 or 2]
    values = integers * scales[..., :1]
    return (values + scales[..., 1:] if form.has_minimum else values).reshape(columns.shape[0], -1)


def bfloat16_bits(value: int) -> int:
    """The bits of an integer as bfloat16."""
    return int(np.asarray(value, ml_dtypes.bfloat16).view(np.uint16))
