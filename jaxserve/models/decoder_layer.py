"""One pre-norm decoder layer, and its rebuilding from a parameter dict."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from flax import nnx

from jaxserve.models.attention import Attend, Attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.mlp import MLP
from jaxserve.models.norm import RMSNorm


class DecoderLayer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer: Any,
        attend: Attend,
        cache: Any,
        sliding_window: int | None,
    ) -> tuple[jax.Array, Any]:
        """[T, d] -> [T, d], and the cache after the tokens were added."""
        mixed, cache = self.attention(self.input_norm(x), rope, layer, attend, cache, sliding_window)
        x = x + mixed
        return x + self.mlp(self.post_attention_norm(x)), cache


def bind_layer(config: ModelConfig, params: dict[str, Any]) -> DecoderLayer:
    """The layer module around the arrays of a nested parameter dict."""
    definition, state = _abstract_layer(config)
    filled = jax.tree.map(lambda variable: variable, state)
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(definition, filled)


@lru_cache(maxsize=64)
def _abstract_layer(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config)))
