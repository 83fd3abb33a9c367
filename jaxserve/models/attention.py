"""Attention without the attending: projections, norms and rotation around a caller's `attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import Linear
from jaxserve.models.norm import RMSNorm
from jaxserve.models.parameter import Parameter, linear_parameters, norm_parameter
from jaxserve.models.rope import apply_rope


class AttentionOptions(NamedTuple):
    """How a layer's scores are made; names and meaning as in `pallas_kernels.paged_attention`.

    Attributes:
      sliding_window: tokens a query sees, itself included; None: all.
      scale: of the scores.
      logit_softcap: scores become `cap * tanh(scores / cap)`; None: off.
      sinks: float[H], a logit per head without a value; None: off.
      value_dim: the first numbers of a key that are its value; None: values are given.
    """

    sliding_window: int | None
    scale: float
    logit_softcap: float | None = None
    sinks: jax.Array | None = None
    value_dim: int | None = None


Attend = Callable[[Any, jax.Array, jax.Array, jax.Array | None, Any, AttentionOptions], tuple[jax.Array, Any]]
"""`attend(layer, q, k, v, cache, options) -> (out, cache)`.

`layer` is an int or a traced int32 scalar, q is [T, H, D], k and v are [T, K, D], q and k rotated;
`out` is [T, H, D]. With `options.value_dim`, v is None and `out` [T, H, value_dim]. `attend` keeps k and v in `cache`
and decides what each token sees.
"""


class Attention(nnx.Module):
    """Grouped-query attention: query head h uses KV head h * K // H."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * size, config.num_kv_heads * size
        self.head_dim = size
        self.scale = config.score_scale
        self.logit_softcap = config.attention_softcap
        self.qk_norm = config.qk_norm
        self.interleaved = config.rope_interleaved
        self.q_proj = Linear(hidden, queries, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, keys, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, hidden, bias=config.o_bias)
        if config.qk_norm is not None:
            sizes = (size, size) if config.qk_norm == "head" else (queries, keys)
            self.q_norm, self.k_norm = (RMSNorm(each, config.rms_norm_eps, offset=config.norm_offset) for each in sizes)
        self.sinks = nnx.Param(jnp.zeros(config.num_heads)) if config.attention_sinks else None

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
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.reshape(tokens, -1, self.head_dim) for each in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rope(each, *rope, interleaved=self.interleaved) for each in (q, k))
        sinks = None if self.sinks is None else self.sinks[...]
        options = AttentionOptions(sliding_window, self.scale, self.logit_softcap, sinks)
        out, cache = attend(layer, q, k, v, cache, options)
        return self.o_proj(out.reshape(tokens, -1)), cache


def attention_parameters(config: ModelConfig) -> list[Parameter]:
    """The arrays of `Attention`."""
    hidden, size = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size

    def linear(name: str, sizes: tuple[int, int], axes: tuple[str, str], bias: bool) -> list[Parameter]:
        return linear_parameters(("attention", name), sizes, axes, bias)

    found = [
        *linear("q_proj", (hidden, queries), ("embed", "heads"), config.qkv_bias),
        *linear("k_proj", (hidden, keys), ("embed", "kv_heads"), config.qkv_bias),
        *linear("v_proj", (hidden, keys), ("embed", "kv_heads"), config.qkv_bias),
        *linear("o_proj", (queries, hidden), ("heads", "embed"), config.o_bias),
    ]
    if config.attention_sinks:
        found.append(Parameter(("attention", "sinks"), (config.num_heads,), ("heads",)))
    if config.qk_norm == "head":
        found += [norm_parameter(("attention", name), size, None) for name in ("q_norm", "k_norm")]
    elif config.qk_norm == "full":
        found.append(norm_parameter(("attention", "q_norm"), queries, "heads"))
        found.append(norm_parameter(("attention", "k_norm"), keys, "kv_heads"))
    return found
