"""The gated feed-forward block (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import Linear

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.hidden_act]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, d] -> [T, d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        # In float32 and rounded once: on CPU, rounding after every operation costs more than the operations.
        mixed = self.activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down_proj(mixed.astype(x.dtype))
