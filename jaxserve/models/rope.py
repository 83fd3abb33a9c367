"""Rotary position embedding: frequencies per scaling kind, and the rotation.

Frequencies are computed once on the host in float64, the rotation in float32 whatever the model's
dtype: at position 100,000 a bfloat16 angle would be off by whole turns.

Kinds and their sources:
  linear             Chen et al. 2023, positions divided by the factor (here: frequencies).
  dynamic            NTK-aware base, for the longest position the model serves.
  llama3             Llama 3.1: long waves divided by the factor, short kept, a ramp between.
  yarn               Peng et al. 2023, per-dimension interpolation ramp and an attention factor.
  longrope           Ding et al. 2024, a factor per dimension, one list below and one above the original
                     context length; which one follows from the longest position, so that cached keys
                     of a sequence never mix both.
  frequency_factors  a factor per dimension given as data (GGUF's `rope_freqs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core import UnsupportedModelError
from jaxserve.models.config import RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "frequency_factors")
_ALIASES = {"su": "longrope"}


def rope_config_from_hf(hf: Mapping[str, Any], *, default_theta: float = 10000.0) -> RopeConfig:
    """Reads `rope_parameters` (current) or `rope_scaling` + `rope_theta` (older) of a config.json.

    Args:
      hf: the whole configuration.
      default_theta: base where none is given.

    Raises:
      UnsupportedModelError: the rope type is unknown, or parameters it needs are missing, or layers differ.
    """
    values: dict[str, Any] = dict(hf.get("rope_scaling") or {})
    values.update(hf.get("rope_parameters") or {})
    by_layer = [name for name, value in values.items() if isinstance(value, Mapping)]
    if by_layer:
        raise UnsupportedModelError(
            f"rope_parameters has an entry for {by_layer[0]}; this architecture has one rope for all layers"
        )
    kind = values.get("rope_type", values.get("type")) or "default"
    kind = _ALIASES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    max_position = int(hf.get("max_position_embeddings", 2048))
    theta = values.get("rope_theta", hf.get("rope_theta"))
    partial = values.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    original = values.get("original_max_position_embeddings", hf.get("original_max_position_embeddings"))
    if kind == "llama3":
        _require(kind, values, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    elif kind in ("linear", "dynamic"):
        _require(kind, values, ("factor",))
    elif kind == "longrope":
        _require(kind, values, ("short_factor", "long_factor"))
    elif kind == "frequency_factors":
        _require(kind, values, ("factors",))
    original = int(original or max_position)
    factor = values.get("factor")
    factor = float(factor) if factor is not None else max_position / original
    return RopeConfig(
        kind=kind,
        theta=float(default_theta if theta is None else theta),
        factor=factor,
        original_max_position=original,
        attention_factor=_attention_factor(kind, values, factor, original, max_position),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        short_factors=tuple(float(x) for x in values.get("short_factor", ())),
        long_factors=tuple(float(x) for x in values.get("long_factor", values.get("factors", ()))),
        partial_rotary_factor=1.0 if partial is None else float(partial),
    )


def _require(kind: str, values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise UnsupportedModelError(f"rope type {kind!r} needs {', '.join(missing)} in the model's rope parameters")


def _attention_factor(kind: str, values: Mapping[str, Any], factor: float, original: int, max_position: int) -> float:
    given = values.get("attention_factor")
    if given is not None and kind in ("yarn", "longrope"):
        return float(given)
    if kind == "yarn":
        mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(mscale_all_dim))
        return yarn_mscale(factor, 1.0)
    if kind == "longrope":
        extension = max_position / original if values.get("factor") is None else factor
        return 1.0 if extension <= 1.0 else math.sqrt(1.0 + math.log(extension) / math.log(original))
    return 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention's temperature for a context extended by `factor` (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """Leading dimensions of a head that turn."""
    return int(head_dim * rope.partial_rotary_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> np.ndarray:
    """Radians per position of each rotating pair.

    Args:
      rope: scaling.
      head_dim: of a head.
      max_position: longest context the model is served with; `dynamic` and `longrope` depend on it.

    Returns:
      float64[rotary_dim / 2].

    Raises:
      UnsupportedModelError: unknown kind, or a list of factors of the wrong length.
    """
    dim = rotary_dim(rope, head_dim)
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    base = rope.theta**-exponents
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "dynamic":
        length = max(max_position, rope.original_max_position)
        growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        return (rope.theta * growth ** (dim / (dim - 2))) ** -exponents
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, dim)
    if rope.kind in ("longrope", "frequency_factors"):
        longer = rope.kind == "frequency_factors" or max_position > rope.original_max_position
        factors = np.asarray(rope.long_factors if longer else rope.short_factors, np.float64)
        if factors.shape != base.shape:
            raise UnsupportedModelError(
                f"rope type {rope.kind!r} has {factors.size} factors; a head of {dim} rotating dimensions"
                f" needs {dim // 2}"
            )
        return base / factors
    raise UnsupportedModelError(f"rope type {rope.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > shortest_scaled, base / rope.factor, between)
    return np.where(wavelength < longest_kept, base, scaled)


def _yarn(rope: RopeConfig, base: np.ndarray, dim: int) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        # The (fractional) dimension that makes `rotations` turns over the original context.
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of width 0 would divide by it
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def rope_tables(
    rope: RopeConfig, head_dim: int, max_position: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every token's angles, attention factor included.

    Args:
      positions: int32[T].

    Returns:
      float32[T, rotary_dim / 2], twice.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim, max_position), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns the leading dimensions of each head.

    Args:
      x: [T, N, D] queries or keys.
      cos, sin: float32[T, R / 2] with R <= D.
      interleaved: dimension 2 * i turns with 2 * i + 1, not i with i + R / 2.

    Returns:
      [T, N, D] in x's dtype. If interleaved, the first of all pairs, then the second: another order than x's, which
      does not matter to scores of queries and keys that both come from here.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turning = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    parts = [part.astype(x.dtype) for part in turned]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)
