"""Feed-forward blocks, by the kind that a layer asks for: gated (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import Linear
from jaxserve.models.parameter import Parameter, linear_parameters

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""What `hidden_act` may be."""


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, d] -> [T, d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        # In float32 and rounded once: on CPU, rounding after every operation costs more than the operations.
        mixed = self.activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down_proj(mixed.astype(x.dtype))


def dense_parameters(config: ModelConfig) -> list[Parameter]:
    """The arrays of `MLP`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    axes = {"down_proj": ("mlp", "embed")}
    return [
        parameter
        for name, size in sizes.items()
        for parameter in linear_parameters(("mlp", name), size, axes.get(name, ("embed", "mlp")), config.mlp_bias)
    ]


class MlpKind(NamedTuple):
    """A kind of feed-forward block.

    Attributes:
      module: made from the config; its call takes [T, d] to [T, d].
      parameters: the arrays it holds, all at paths that begin with "mlp".
    """

    module: Callable[[ModelConfig], Any]
    parameters: Callable[[ModelConfig], list[Parameter]]


MLPS = {"dense": MlpKind(MLP, dense_parameters)}
"""By name; `jaxserve.models.config.MLP_KINDS` lists the names."""
