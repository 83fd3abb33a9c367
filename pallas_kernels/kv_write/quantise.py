"""Rounding of keys and values to 8 bits, with a scale per token and KV head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The number that a vector's largest magnitude is stored as, by dtype."""


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rounds each vector to `dtype` so that its largest magnitude is the dtype's.

    A vector of zeros, or of numbers so small that float32 has no scale for them, becomes zeros with scale 0.
    One with a NaN or an infinity in it has a scale that is no finite number: all of it reads as NaN or
    infinity, and nothing else does.

    Args:
      x: float[..., D].
      dtype: a name in `LARGEST`.

    Returns:
      (dtype[..., D], float32[...]). Stored times scale is x within scale / 2 for int8, and within x / 16
      or scale / 1024, whichever is larger, for float8_e4m3fn.
    """
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / largest
    usable = (scales > 0) & jnp.isfinite(scales)
    stored = jnp.clip(x / jnp.where(usable, scales, 1.0)[..., None], -largest, largest)
    # What a scale of no use multiplies: 0 stays 0, and 1 becomes the NaN or infinity that the scale is.
    stored = jnp.where(usable[..., None], stored, jnp.where(scales == 0, 0.0, 1.0)[..., None])
    if jnp.issubdtype(dtype, jnp.integer):
        stored = jnp.round(stored)
    return stored.astype(dtype), scales
