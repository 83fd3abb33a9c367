"""Matrices of small numbers with scales, as plain arrays: quantised weights of any device, whose products XLA makes.

A value is `scale * number + minimum`; a scale is that of a block of values along `in`, or of a whole column. The
numbers of a form in blocks are those of `quantised`, in another order: nothing is rounded by being kept here.

With a scale per column, the numbers are widened as the product reads them, and what comes out is scaled: no compiler
keeps a widened matrix. With a scale per block, the matrix is widened and scaled on its way into the product; whether
that is one operation is up to the compiler, see README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.matmul.quantised import BLOCK_SIZES, Blocks, QuantisedForm

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest number of a column becomes."""
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class ScaledForm:
    """How a scaled matrix is stored.

    Attributes:
      numbers: "int8", "int4", "uint4" or "float8_e4m3fn".
      block: values of a block, 16 or 32; None: a column is one block.
      has_minimum: whether blocks have one.
      scale: "float16" or "float32", the dtype of scales and minima.
    """

    numbers: str
    block: int | None = None
    has_minimum: bool = False
    scale: str = "float32"

    @property
    def bits(self) -> int:
        """Of a number."""
        return 4 if self.numbers in ("int4", "uint4") else 8


class ScaledMatrix(NamedTuple):
    """A matrix [in, out], or [out, in] as embeddings are; several of one form may be stacked in front.

    Attributes:
      numbers: of the matrix' shape.
      scales: the same, but for `in`, which counts blocks; 1 is a scale per column.
      minima: of the scales' shape and dtype; None: zeros.
    """

    numbers: jax.Array
    scales: jax.Array
    minima: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, or of the stack."""
        return self.numbers.shape


def scaled_form(form: QuantisedForm) -> ScaledForm:
    """The form that has the numbers of a packed one."""
    numbers = "int8" if form.bits == 8 else "uint4" if form.has_minimum else "int4"
    return ScaledForm(numbers, form.block, form.has_minimum, form.scale)


def can_scale(in_size: int, form: ScaledForm) -> bool:
    """Whether a matrix of so many rows can have this form."""
    return form.block is None or (form.block in BLOCK_SIZES and in_size % form.block == 0)


def abstract_scaled(shape: tuple[int, ...], form: ScaledForm, *, in_axis: int = -2) -> ScaledMatrix:
    """Shapes and dtypes of a matrix, or of several, whose axis `in_axis` (-2 or -1) is `in`."""
    blocks = list(shape)
    blocks[in_axis] = 1 if form.block is None else shape[in_axis] // form.block
    scales = jax.ShapeDtypeStruct(tuple(blocks), np.dtype(form.scale))
    numbers = jax.ShapeDtypeStruct(tuple(shape), np.dtype(getattr(ml_dtypes, form.numbers, form.numbers)))
    return ScaledMatrix(numbers, scales, scales if form.has_minimum else None)


def scale_columns(columns: np.ndarray[Any, Any], form: ScaledForm) -> Blocks:
    """Quantises columns [out, in] with a scale each: the largest number of a column becomes the form's largest.

    Raises:
      ValueError: a number is not finite.
    """
    wide = np.asarray(columns, np.float32)
    if not np.isfinite(wide).all():
        raise ValueError("weights must be finite to be quantised")
    scales = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(_LARGEST[form.numbers]), _LEAST_SCALE)
    found = wide / scales
    if form.numbers == "int8":
        return Blocks(np.rint(found).astype(np.int8), scales)
    return Blocks(found.astype(ml_dtypes.float8_e4m3fn), scales)


def put_columns(whole: ScaledMatrix, columns: slice, blocks: Blocks, *, in_axis: int = -2) -> None:
    """Writes columns into numpy arrays of one matrix' shapes.

    Args:
      blocks: of those columns, [out, in].
    """
    for array, part in zip(whole, blocks, strict=True):
        if array is not None:
            assert part is not None, whole
            array[(columns, slice(None)) if in_axis == -1 else (slice(None), columns)] = (
                part if in_axis == -1 else part.T
            )


def scaled_matmul(
    x: jax.Array, matrix: ScaledMatrix, *, transposed: bool = False, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """`x @ matrix`, summed in float32.

    Args:
      x: [N, in].
      matrix: [in, out], or [out, in] when `transposed`.
      out_dtype: of the result; x's when None.

    Returns:
      [N, out].
    """
    in_axis = 1 if transposed else 0
    out_dtype = x.dtype if out_dtype is None else out_dtype

    def product(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        contracted = (((1,), (in_axis,)), ((), ()))
        return jax.lax.dot_general(x, kernel, contracted, precision=precision, preferred_element_type=dtype)

    if matrix.scales.shape[in_axis] == 1 and matrix.minima is None:
        by_column = product(matrix.numbers.astype(x.dtype), jnp.dtype(jnp.float32)) * matrix.scales.reshape(1, -1)
        return by_column.astype(out_dtype)
    return product(widened(matrix, x.dtype), out_dtype)


def scaled_rows(matrix: ScaledMatrix, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows int32[N] of a matrix [out, in]: [N, in]."""
    return widened(jax.tree.map(lambda leaf: leaf[rows], matrix), dtype)


def widened(matrix: ScaledMatrix, dtype: jnp.dtype) -> jax.Array:
    """The values, computed in float32, as an array of the numbers' shape."""
    shape, blocks = matrix.numbers.shape, matrix.scales.shape
    split = [part for size, count in zip(shape, blocks, strict=True) for part in (count, size // count)]
    apart = tuple(range(1, 2 * len(blocks), 2))

    def spread(scales: jax.Array) -> jax.Array:
        return jnp.expand_dims(scales.astype(jnp.float32), apart)

    values = matrix.numbers.reshape(split).astype(jnp.float32) * spread(matrix.scales)
    if matrix.minima is not None:
        values = values + spread(matrix.minima)
    return values.reshape(shape).astype(dtype)


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Of an array on a device, where numbers of 4 bits lie two to the byte."""
    kind, count = jnp.dtype(dtype), int(np.prod(shape, dtype=np.int64))
    return -(-count // 2) if kind.name in ("int4", "uint4") else count * kind.itemsize
