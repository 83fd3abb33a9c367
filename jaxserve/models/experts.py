"""A mixture of experts as a feed-forward block: a router, experts stacked to one array per matrix, shared experts.

On several devices each runs its own experts on all tokens, or all experts with a part of their inner width
(`ExpertsConfig.split`), and the results are summed; weights stay where they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.models.batch import Batch
from jaxserve.models.config import ExpertsConfig, ModelConfig
from jaxserve.models.expert_product import ExpertWeights, expert_product
from jaxserve.models.leaf_sharding import leaf_specs
from jaxserve.models.mesh_axes import axis_size, model_axes
from jaxserve.models.mlp import ACTIVATIONS, MLP, dense_parameters
from jaxserve.models.parameter import Parameter
from pallas_kernels.matmul import ScaledMatrix

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def route(
    experts: ExpertsConfig, logits: jax.Array, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Which experts a token goes to; of equal ones the first.

    Args:
      logits: float32[T, E].
      correction: float32[E]; None: none.

    Returns:
      (float32[T, k] weights, int32[T, k] experts).
    """
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}.get(experts.scoring, lambda x: x)(logits)
    choosing = scores if correction is None else scores + correction
    if experts.num_groups > 1:
        grouped = choosing.reshape(logits.shape[0], experts.num_groups, -1)
        best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        groups = jax.lax.top_k(best, experts.num_groups_chosen)[1]
        allowed = (groups[:, :, None] == jnp.arange(experts.num_groups)).any(axis=1)
        choosing = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(logits.shape)
    chosen = jax.lax.top_k(choosing, experts.num_chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.scoring == "softmax_of_chosen":
        weights = jax.nn.softmax(weights)
    elif experts.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * experts.scale, chosen


def mix(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes into an expert's last matrix, float32[N, f] as its arguments."""
    experts = config.experts
    assert experts is not None
    if experts.swiglu_limit is None:
        return ACTIVATIONS[config.hidden_act](gate) * up
    limit = experts.swiglu_limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(experts.swiglu_alpha * gate)


class Router(nnx.Module):
    """Logits in float32 whatever the model's dtype: a rounded one would choose other experts."""

    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        self.weight = nnx.Param(jnp.zeros((hidden, experts.num_experts)))
        self.bias = nnx.Param(jnp.zeros(experts.num_experts)) if experts.router_bias else None
        self.correction = nnx.Param(jnp.zeros(experts.num_experts)) if experts.correction else None
        self.experts = experts

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, d] -> weights and experts, as `route` gives them."""
        weight = self.weight[...].astype(jnp.float32)
        logits = jnp.dot(x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        return route(self.experts, logits, None if self.correction is None else self.correction[...])


class ExpertLinear(nnx.Module):
    """`x @ kernel + bias` of every expert."""

    def __init__(self, shape: tuple[int, int, int], *, bias: bool) -> None:
        self.kernels = nnx.Param(jnp.zeros(shape))
        self.biases = nnx.Param(jnp.zeros((shape[0], shape[2]))) if bias else None


class ExpertStack(nnx.Module):
    """The experts' matrices."""

    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        num, inner = experts.num_experts, experts.inner_size
        self.gate_proj = ExpertLinear((num, hidden, inner), bias=experts.bias)
        self.up_proj = ExpertLinear((num, hidden, inner), bias=experts.bias)
        self.down_proj = ExpertLinear((num, inner, hidden), bias=experts.bias)

    def weights(self) -> ExpertWeights:
        """As one tuple."""
        projections = [getattr(self, name) for name in _PROJECTIONS]
        kernels = (each.kernels.get_value() for each in projections)
        return ExpertWeights(*kernels, *(None if each.biases is None else each.biases[...] for each in projections))


class Experts(nnx.Module):
    """The weighted sum of what a token's experts make of it, and what the shared ones do."""

    def __init__(self, config: ModelConfig) -> None:
        experts = config.experts
        assert experts is not None
        self.config = experts
        self.mix = partial(mix, config)
        self.router = Router(config.hidden_size, experts)
        self.experts = ExpertStack(config.hidden_size, experts)
        self.shared = MLP(config, experts.shared_size) if experts.shared_size else None

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """[T, d] -> [T, d]; 0 of a token of padding, but for the shared experts."""
        weights, chosen = self.router(x)
        if batch.live is not None:
            live = batch.live[:, None]
            weights, chosen = jnp.where(live, weights, 0.0), jnp.where(live, chosen, self.config.num_experts)
        out = self._routed(x, weights, chosen, batch).astype(x.dtype)
        return out if self.shared is None else out + self.shared(x, batch)

    def _routed(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, batch: Batch) -> jax.Array:
        own = self.experts.weights()
        mesh = batch.mesh
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        way = "blocks" if platform == "cpu" or any(isinstance(leaf, ScaledMatrix) for leaf in own) else "ragged"
        product = partial(expert_product, mix=self.mix, way=way)
        if mesh is None or mesh.size == 1:
            return _sum(product(x, chosen, own), weights)
        axes = model_axes(mesh)
        split = self.config.split(axis_size(mesh, axes))

        def local(x: jax.Array, weights: jax.Array, chosen: jax.Array, own: ExpertWeights) -> jax.Array:
            device = jax.lax.axis_index(axes)
            if split == "expert":
                count = own.gate.shape[0]
                mine = chosen - device * count
                chosen = jnp.where((mine >= 0) & (mine < count), mine, count)
            elif split == "expert_mlp" and own.down_bias is not None:
                own = own._replace(down_bias=jnp.where(device == 0, own.down_bias, 0))
            out = _sum(product(x, chosen, own), weights)
            return out if split is None else jax.lax.psum(out, axes)

        everywhere = PartitionSpec()
        specs = ExpertWeights(
            *(
                None if leaf is None else leaf_specs(spec, leaf, mesh)
                for spec, leaf in zip(_specs(split, axes), own, strict=True)
            )
        )
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(everywhere, everywhere, everywhere, specs),
            out_specs=everywhere,
            check_vma=False,
        )(x, weights, chosen, own)


def _sum(y: jax.Array, weights: jax.Array) -> jax.Array:
    """float32[T, d] of [T, k, d] and float32[T, k]."""
    return (y.astype(jnp.float32) * weights[:, :, None]).sum(axis=1)


def _specs(split: str | None, mesh_axes: str | tuple[str, str]) -> list[PartitionSpec]:
    """Of `ExpertWeights`."""
    place = {split: mesh_axes}
    axes = [_AXES[name, leaf] for leaf in ("kernels", "biases") for name in _PROJECTIONS]
    return [PartitionSpec(*(place.get(axis) if axis else None for axis in each)) for each in axes]


_AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("gate_proj", "kernels"): ("expert", "embed", "expert_mlp"),
    ("up_proj", "kernels"): ("expert", "embed", "expert_mlp"),
    ("down_proj", "kernels"): ("expert", "expert_mlp", "embed"),
    ("gate_proj", "biases"): ("expert", "expert_mlp"),
    ("up_proj", "biases"): ("expert", "expert_mlp"),
    ("down_proj", "biases"): ("expert", "embed"),
}


def experts_parameters(config: ModelConfig) -> list[Parameter]:
    """The arrays of `Experts`."""
    experts = config.experts
    assert experts is not None
    num, hidden, inner = experts.num_experts, config.hidden_size, experts.inner_size
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    router: list[Parameter] = [Parameter(("mlp", "router", "weight"), (hidden, num), ("embed", None))]
    if experts.router_bias:
        router.append(Parameter(("mlp", "router", "bias"), (num,), (None,)))
    if experts.correction:
        router.append(Parameter(("mlp", "router", "correction"), (num,), (None,), is_float32=True))
    found: list[Parameter] = []
    for name, size in sizes.items():
        path: tuple[Any, ...] = ("mlp", "experts", name)
        found.append(Parameter((*path, "kernels"), (num, *size), _AXES[name, "kernels"]))
        if experts.bias:
            found.append(Parameter((*path, "biases"), (num, size[1]), _AXES[name, "biases"]))
    shared = experts.shared_size
    return [*router, *found, *(dense_parameters(config, ("mlp", "shared"), shared, "shared_mlp") if shared else [])]
