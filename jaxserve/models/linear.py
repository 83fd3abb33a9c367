"""Matrix products and the linear module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.adapted import AdaptedMatrix
from pallas_kernels.matmul import (
    PackedMatrix,
    ScaledMatrix,
    is_packed,
    packed_columns,
    packed_matmul,
    scaled_matmul,
    scaled_rows,
)


def matmul(
    x: jax.Array, kernel: PackedMatrix | ScaledMatrix, *, transposed: bool = False, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """`x @ kernel` in full precision of x's dtype.

    Args:
      x: [N, in].
      kernel: [in, out], or [out, in] when `transposed`, of x's dtype or one of 16 bits that x's holds, or scaled; or
        packed from [in, out], quantised or not (`pallas_kernels.matmul`).
      out_dtype: of the result; x's when None.

    Returns:
      [N, out].
    """
    rows = x.shape[0]
    if not isinstance(kernel, ScaledMatrix) and is_packed(kernel):
        return packed_matmul(x, kernel, out_dtype)  # always from [in, out], so `transposed` has been seen to
    if rows == 1 and x.dtype != jnp.float32:
        # One row takes XLA CPU's matrix-vector path, which for bfloat16 is ten times slower than two rows.
        x = jnp.concatenate([x, x])
    if isinstance(kernel, ScaledMatrix):
        return scaled_matmul(x, kernel, transposed=transposed, out_dtype=out_dtype)[:rows]
    product = jax.lax.dot_general(
        x,
        kernel.astype(x.dtype),
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    return product[:rows]


def embedding_rows(embed: PackedMatrix | ScaledMatrix, token_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows int32[T] of an embedding [V, d], in whatever form it is kept: [T, d] of `dtype`."""
    if isinstance(embed, ScaledMatrix):
        return scaled_rows(embed, token_ids, dtype)
    return packed_columns(embed, token_ids, dtype) if is_packed(embed) else embed[token_ids].astype(dtype)


def head_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Every head's own product, in full precision of its dtype.

    Args:
      x: [N, H, in].
      kernel: [H, in, out].

    Returns:
      [N, H, out].
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("nhi,hio->nho", x, kernel, precision=precision)


class Linear(nnx.Module):
    """`x @ kernel + bias`."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_size, out_size)))
        self.bias = nnx.Param(jnp.zeros((out_size,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, in] -> [N, out]."""
        kernel = self.kernel.get_value()
        adapted = isinstance(kernel, AdaptedMatrix)
        product = matmul(x, kernel.base if adapted else kernel)
        if adapted:
            product = kernel.add_to(product, x)
        return product if self.bias is None else product + self.bias[...]


class HeadLinear(nnx.Module):
    """`head_matmul` with its kernel."""

    def __init__(self, num_heads: int, in_size: int, out_size: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((num_heads, in_size, out_size)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, H, in] -> [N, H, out]."""
        return head_matmul(x, self.kernel.get_value())
