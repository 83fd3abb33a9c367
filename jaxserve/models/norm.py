"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, *, offset: bool = False) -> jax.Array:
    """`x / rms(x) * scale` over the last dimension, computed in float32, returned in x's dtype.

    Args:
      offset: multiply by `1 + scale`; added in float32, as bfloat16 would lose most of a small scale.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    factor = scale.astype(jnp.float32) + 1.0 if offset else scale.astype(jnp.float32)
    return (wide * inverse * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        self.scale = nnx.Param(jnp.zeros((size,)) if offset else jnp.ones((size,)))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.scale[...], self.eps, offset=self.offset)
