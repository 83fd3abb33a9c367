"""Matrices packed for CPUs, and products with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common import native

GROUP = 32
"""Columns that lie together in a packed matrix."""


def can_pack(shape: tuple[int, int], dtype: jnp.dtype) -> bool:
    """Whether a matrix [in, out] has a packed form: float32 or bfloat16, `out` in 32s, bfloat16 with an even `in`."""
    sizes = {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.bfloat16): 2}
    pairs = sizes.get(jnp.dtype(dtype))
    return pairs is not None and shape[1] % GROUP == 0 and shape[0] % pairs == 0


def is_packed(matrix: jax.Array) -> bool:
    """Whether an array is a packed matrix."""
    return matrix.ndim == 4


def pack(matrix: jax.Array) -> jax.Array:
    """A matrix [in, out] as [out / 32, in / p, 32, p]: p, the rows side by side, is 2 for bfloat16 and 1 for float32.

    Raises:
      ValueError: it has no packed form.
    """
    rows, columns = matrix.shape
    if not can_pack(matrix.shape, matrix.dtype):
        raise ValueError(f"a {matrix.dtype} matrix {matrix.shape} cannot be packed: see can_pack")
    pairs = 2 if matrix.dtype == jnp.bfloat16 else 1
    return matrix.reshape(rows // pairs, pairs, columns // GROUP, GROUP).transpose(2, 0, 3, 1)


def packed_columns(matrix: jax.Array, columns: jax.Array) -> jax.Array:
    """Columns int32[N] of a packed matrix, each a row of the result [N, in]."""
    picked = matrix[columns // GROUP, :, columns % GROUP, :]
    return picked.reshape(columns.shape[0], -1)


def packed_matmul(x: jax.Array, matrix: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ matrix` on CPU, summed in float32.

    Args:
      x: [N, in], of the matrix' dtype.
      matrix: packed.
      out_dtype: x's, or float32; x's when None.

    Returns:
      [N, out].

    Raises:
      ImportError: numba is missing.
      ValueError: shapes or dtypes do not fit together.
    """
    native.require()
    _check(x, matrix)
    from pallas_kernels.matmul.native_cpu import call_name

    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"a product of {x.dtype} is {x.dtype} or float32, not {out_dtype}")
    out = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0] * GROUP), out_dtype)
    return jax.ffi.ffi_call(call_name(jnp.dtype(x.dtype).name, out_dtype.name), out)(x, matrix)


def _check(x: jax.Array, matrix: jax.Array) -> None:
    """Raises ValueError unless x and a packed matrix fit: the call reads memory by their shapes."""
    rows = matrix.shape[1] * matrix.shape[3] if is_packed(matrix) else None
    if x.ndim != 2 or x.shape[1] != rows or x.dtype != matrix.dtype or x.dtype.name not in native.NATIVE_DTYPES:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and the packed matrix {matrix.dtype}{list(matrix.shape)}; they must be"
            f" [N, in] and [out / {GROUP}, in / p, {GROUP}, p], both {' or '.join(native.NATIVE_DTYPES)}"
        )
