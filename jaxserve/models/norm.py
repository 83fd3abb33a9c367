"""Normalisation: by the root mean square (Zhang and Sennrich 2019), by mean and variance (Ba et al. 2016)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.parameter import Parameter, norm_parameter


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, *, offset: bool = False) -> jax.Array:
    """`x / rms(x) * scale` over the last dimension, computed in float32, returned in x's dtype.

    Args:
      offset: multiply by `1 + scale`; added in float32, as bfloat16 would lose most of a small scale.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    factor = scale.astype(jnp.float32) + 1.0 if offset else scale.astype(jnp.float32)
    return (wide * inverse * factor).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """`(x - mean(x)) / std(x) * scale + bias` over the last dimension, computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        self.scale = nnx.Param(jnp.zeros((size,)) if offset else jnp.ones((size,)))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.scale[...], self.eps, offset=self.offset)


class LayerNorm(nnx.Module):
    """`layer_norm` with its scale and bias."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)


def residual_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the config's kind."""
    if config.norm_kind == "layer":
        return LayerNorm(config.hidden_size, config.rms_norm_eps)
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)


def residual_norm_parameters(config: ModelConfig, path: tuple[str, ...]) -> list[Parameter]:
    """The arrays of `residual_norm` at `path`."""
    found = [norm_parameter(path, config.hidden_size)]
    if config.norm_kind == "layer":
        found.append(Parameter((*path, "bias"), (config.hidden_size,), ("embed",)))
    return found


def final_norm(config: ModelConfig, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The norm after the last layer, whose arrays are `final_norm` and, of a layer norm, `final_norm_bias`.

    Args:
      params: the model's tree.
      x: [N, d].
    """
    if config.norm_kind == "layer":
        return layer_norm(x, params["final_norm"], params["final_norm_bias"], config.rms_norm_eps)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps, offset=config.norm_offset)
