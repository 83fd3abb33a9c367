"""The dense feed-forward block, gated (Shazeer 2020) or plain; other kinds are in `mlp_kinds`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.batch import ONE_DEVICE, Batch
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

    def __init__(self, config: ModelConfig, inner_size: int | None = None) -> None:
        """`inner_size` is `intermediate_size` when None."""
        hidden, inner = config.hidden_size, inner_size or config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: jax.Array, batch: Batch = ONE_DEVICE) -> jax.Array:
        """[T, d] -> [T, d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        # In float32 and rounded once: on CPU, rounding after every operation costs more than the operations.
        mixed = self.activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down_proj(mixed.astype(x.dtype))


def dense_parameters(
    config: ModelConfig, path: tuple[str, ...] = ("mlp",), inner_size: int | None = None, axis: str = "mlp"
) -> list[Parameter]:
    """The arrays of an `MLP` at `path`; `axis` is the logical axis of its inner width."""
    hidden, inner = config.hidden_size, inner_size or config.intermediate_size
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    axes = {"down_proj": (axis, "embed")}
    return [
        parameter
        for name, size in sizes.items()
        for parameter in linear_parameters((*path, name), size, axes.get(name, ("embed", axis)), config.mlp_bias)
    ]


class PlainMLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, config: ModelConfig) -> None:
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: jax.Array, batch: Batch = ONE_DEVICE) -> jax.Array:
        """[T, d] -> [T, d]."""
        inner = self.activation(self.up_proj(x).astype(jnp.float32))
        return self.down_proj(inner.astype(x.dtype))


def plain_parameters(config: ModelConfig) -> list[Parameter]:
    """The arrays of a `PlainMLP`: a gated one's without its gate."""
    return [parameter for parameter in dense_parameters(config) if "gate_proj" not in parameter.path]
