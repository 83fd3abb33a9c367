"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * scale` over the last dimension, computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, size] -> [N, size]."""
        return rms_norm(x, self.scale[...], self.eps)
