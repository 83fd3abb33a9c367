"""Matrices packed for CPUs, and products with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common import native
from pallas_kernels.matmul.quantised import GROUP, QuantisedMatrix, abstract_quantised, dequantised_columns, form_of

PackedMatrix = jax.Array | QuantisedMatrix
"""A matrix as `packed_matmul` takes it."""


_PAIRS = {"float32": 1, "bfloat16": 2, "float16": 1}
"""Rows that lie side by side in a packed matrix of a dtype."""


def can_pack(shape: tuple[int, int], dtype: jnp.dtype) -> bool:
    """Whether a matrix [in, out] has a packed form: of such a dtype, `out` in 32s, of 16 bits with an even `in`.

    One of float16 also needs a processor that makes float32 of it (on x86, F16C).
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float16 and not native.widens_float16():
        return False
    return dtype.name in _PAIRS and shape[1] % GROUP == 0 and shape[0] * dtype.itemsize % 4 == 0


def packed_shape(shape: tuple[int, int], dtype: jnp.dtype) -> tuple[int, int, int, int]:
    """The shape that a matrix [in, out] has when it is packed; see `pack`."""
    pairs = _PAIRS[jnp.dtype(dtype).name]
    return shape[1] // GROUP, shape[0] // pairs, GROUP, pairs


def is_packed(matrix: PackedMatrix) -> bool:
    """Whether this is a packed matrix, quantised or not."""
    return isinstance(matrix, QuantisedMatrix) or matrix.ndim == 4


def pack(matrix: jax.Array) -> jax.Array:
    """A matrix [in, out] as [out / 32, in / p, 32, p]: p, the rows side by side, is 2 for bfloat16 and 1 for others.

    Raises:
      ValueError: it has no packed form.
    """
    if not can_pack(matrix.shape, matrix.dtype):
        raise ValueError(f"a {matrix.dtype} matrix {matrix.shape} cannot be packed: see can_pack")
    groups, rows, _, pairs = packed_shape(matrix.shape, matrix.dtype)
    return matrix.reshape(rows, pairs, groups, GROUP).transpose(2, 0, 3, 1)


def packed_columns(matrix: PackedMatrix, columns: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Columns int32[N] of a packed matrix, each a row of the result [N, in].

    Args:
      dtype: of the result; when None the matrix' own, float32 if it is quantised.
    """
    if isinstance(matrix, QuantisedMatrix):
        picked = dequantised_columns(matrix, columns)
    else:
        picked = matrix[columns // GROUP, :, columns % GROUP, :].reshape(columns.shape[0], -1)
    return picked if dtype is None else picked.astype(dtype)


def packed_matmul(x: jax.Array, matrix: PackedMatrix, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ matrix` on CPU, summed in float32.

    Args:
      x: [N, in], float32, or bfloat16 if the matrix is bfloat16 or quantised.
      matrix: packed. One of 16 bits gives a float32 x the bits that the same numbers as float32 give.
      out_dtype: x's, or float32; x's when None.

    Returns:
      [N, out].

    Raises:
      ImportError: numba is missing.
      ValueError: shapes or dtypes do not fit together.
    """
    native.require()
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"a product of {x.dtype} is {x.dtype} or float32, not {out_dtype}")
    if isinstance(matrix, QuantisedMatrix):
        _check_quantised(x, matrix)
        from pallas_kernels.matmul import quantised_cpu

        call = quantised_cpu.call_name(jnp.dtype(x.dtype).name, form_of(matrix), out_dtype.name)
        arguments: tuple[jax.Array, ...] = matrix
        groups = matrix.integers.shape[0]
    else:
        _check(x, matrix)
        from pallas_kernels.matmul import native_cpu

        call = native_cpu.call_name(jnp.dtype(x.dtype).name, jnp.dtype(matrix.dtype).name, out_dtype.name)
        arguments = (matrix,)
        groups = matrix.shape[0]
    out = jax.ShapeDtypeStruct((x.shape[0], groups * GROUP), out_dtype)
    return jax.ffi.ffi_call(call, out)(x, *arguments)


def _check(x: jax.Array, matrix: jax.Array) -> None:
    """Raises ValueError unless x and a packed matrix fit: the call reads memory by their shapes."""
    fits = x.ndim == 2 and can_multiply(x.dtype, matrix.dtype)
    if not fits or matrix.shape != packed_shape((x.shape[1], matrix.shape[0] * GROUP), matrix.dtype):
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and the packed matrix {matrix.dtype}{list(matrix.shape)}; they must be"
            f" [N, in] and [out / {GROUP}, in / p, {GROUP}, p], both {' or '.join(native.NATIVE_DTYPES)}, or the matrix"
            " float16 or bfloat16 and x float32"
        )


def can_multiply(dtype: jnp.dtype, weight_dtype: jnp.dtype) -> bool:
    """Whether rows of a dtype are multiplied with packed matrices of another, not quantised."""
    name, weight_name = jnp.dtype(dtype).name, jnp.dtype(weight_dtype).name
    return name in native.NATIVE_DTYPES and weight_name in (_PAIRS if name == "float32" else (name,))


def _check_quantised(x: jax.Array, matrix: QuantisedMatrix) -> None:
    """Raises ValueError unless x and a quantised matrix fit, and the arrays of that each other."""
    wanted = abstract_quantised(matrix.shape, form_of(matrix))
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tuple(matrix))
    if found != jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tuple(wanted)):
        raise ValueError(f"a quantised matrix has arrays {found}, which do not fit together: use pack_quantised")
    if x.ndim != 2 or x.shape[1] != matrix.shape[0] or x.dtype.name not in native.NATIVE_DTYPES:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and the quantised matrix {list(matrix.shape)}; x must be [N, in],"
            f" {' or '.join(native.NATIVE_DTYPES)}"
        )
