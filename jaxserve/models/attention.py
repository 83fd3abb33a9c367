"""Attention without the attending: projections and rotation around a caller's `attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import Linear
from jaxserve.models.rope import apply_rope

Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, Any, int | None], tuple[jax.Array, Any]]
"""`attend(layer, q, k, v, cache, sliding_window) -> (out, cache)`.

`layer` is an int or a traced int32 scalar, q is [T, H, D], k and v are [T, K, D], q and k rotated;
`out` is [T, H, D]. `attend` keeps k and v in `cache` and decides what each token sees.
"""


class Attention(nnx.Module):
    """Grouped-query attention: query head h uses KV head h * K // H."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * size, config.num_kv_heads * size
        self.head_dim = size
        self.q_proj = Linear(hidden, queries, bias=config.attention_bias)
        self.k_proj = Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj = Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj = Linear(queries, hidden, bias=config.attention_bias)

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
        tokens = x.shape[0]
        q = self.q_proj(x).reshape(tokens, -1, self.head_dim)
        k = self.k_proj(x).reshape(tokens, -1, self.head_dim)
        v = self.v_proj(x).reshape(tokens, -1, self.head_dim)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out, cache = attend(layer, q, k, v, cache, sliding_window)
        return self.o_proj(out.reshape(tokens, -1)), cache
