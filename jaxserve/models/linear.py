"""Matrix products and the linear module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.adapted import AdaptedMatrix
from pallas_kernels.matmul import PackedMatrix, is_packed, packed_matmul


def matmul(
    x: jax.Array, kernel: PackedMatrix, *, transposed: bool = False, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """`x @ kernel` in full precision of x's dtype.

    Args:
      x: [N, in].
      kernel: [in, out], or [out, in] when `transposed`, of x's dtype or one of 16 bits that x's holds; or packed from
        [in, out], quantised or not (`pallas_kernels.matmul`).
      out_dtype: of the result; x's when None.

    Returns:
      [N, out].
    """
    if is_packed(kernel):  # always from [in, out], so `transposed` has been seen to
        return packed_matmul(x, kernel, out_dtype)
    rows = x.shape[0]
    if rows == 1 and x.dtype != jnp.float32:
        # One row takes XLA CPU's matrix-vector path, which for bfloat16 is ten times slower than two rows.
        x = jnp.concatenate([x, x])
    product = jax.lax.dot_general(
        x,
        kernel.astype(x.dtype),
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    return product[:rows]


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
