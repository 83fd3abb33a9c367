"""One decoder layer put together from its parts, and its rebuilding from a parameter dict."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention import Attend, Attention, attention_parameters
from jaxserve.models.batch import Batch
from jaxserve.models.config import LayerKind, ModelConfig
from jaxserve.models.latent_attention import LatentAttention, latent_attention_parameters
from jaxserve.models.mlp_kinds import MLPS
from jaxserve.models.norm import residual_norm, residual_norm_parameters
from jaxserve.models.parameter import Parameter

_NORMS_BEFORE = ("input_norm", "post_attention_norm")
_NORMS_AFTER = ("attention_out_norm", "mlp_out_norm")
_NORMS = {"pre": _NORMS_BEFORE, "post": _NORMS_AFTER, "sandwich": (*_NORMS_BEFORE, *_NORMS_AFTER)}


class DecoderLayer(nnx.Module):
    """`x + attention_out_norm(attention(input_norm(x)))`, then the same with the MLP and its norms.

    A norm that the config has not is left out; what is added is multiplied by `residual_multiplier`.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        for name in _NORMS[config.norm_placement]:
            setattr(self, name, residual_norm(config))
        self.attention = Attention(config) if config.latent is None else LatentAttention(config)
        self.mlp = MLPS[kind.mlp].module(config)
        self.residual_multiplier = config.residual_multiplier
        self.sliding_window = kind.sliding_window

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer: Any,
        attend: Attend,
        cache: Any,
        batch: Batch,
    ) -> tuple[jax.Array, Any]:
        """[T, d] -> [T, d], and the cache after the tokens were added."""
        mixed, cache = self.attention(self._norm("input_norm", x), rope, layer, attend, cache, self.sliding_window)
        x = self._add(x, self._norm("attention_out_norm", mixed))
        mixed = self.mlp(self._norm("post_attention_norm", x), batch)
        return self._add(x, self._norm("mlp_out_norm", mixed)), cache

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return getattr(self, name)(x) if hasattr(self, name) else x

    def _add(self, x: jax.Array, change: jax.Array) -> jax.Array:
        if self.residual_multiplier == 1.0:
            return x + change
        wide = x.astype(jnp.float32) + change.astype(jnp.float32) * self.residual_multiplier
        return wide.astype(x.dtype)


def layer_parameters(config: ModelConfig, kind: LayerKind) -> list[Parameter]:
    """The arrays of a layer, in a fixed order."""
    norms = [each for name in _NORMS[config.norm_placement] for each in residual_norm_parameters(config, (name,))]
    attention = attention_parameters if config.latent is None else latent_attention_parameters
    return [*norms, *attention(config), *MLPS[kind.mlp].parameters(config)]


def bind_layer(config: ModelConfig, kind: LayerKind, params: dict[str, Any]) -> DecoderLayer:
    """The layer module around the arrays of a nested parameter dict."""
    definition, state = _abstract_layer(config, kind)
    filled = jax.tree.map(lambda variable: variable, state)
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(definition, filled)


@lru_cache(maxsize=64)
def _abstract_layer(config: ModelConfig, kind: LayerKind) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, kind)))
