"""Sharding: one table from logical axis to mesh axis, for parameters and activations alike.

Attention is split by heads, the MLP by its inner width, experts among devices or, where they do not divide, by
their inner width; embedding and output projection by vocabulary. What does not divide is replicated: correct
everywhere, faster where it divides.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import make_params
from pallas_kernels.matmul import ScaledMatrix

MESH_AXIS_OF: dict[str, str | None] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "expert": "model",
    "expert_mlp": "model",
    "shared_mlp": "model",
    "embed": None,
}


def partition_spec(config: ModelConfig, axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are the logical `axes`.

    A flattened `heads * head_dim` dimension counts as `heads`: a head is never cut.
    """
    return PartitionSpec(*(_mesh_axis(config, axis, mesh) for axis in axes))


def param_shardings(config: ModelConfig, mesh: Mesh, *, stacked: bool = False) -> dict[str, Any]:
    """A NamedSharding for every parameter.

    Args:
      mesh: with an axis "model".
      stacked: for layers stacked to `[L, ...]` instead of a list.

    Returns:
      A tree of the parameters' shape.
    """
    tree = make_params(config, lambda weight: NamedSharding(mesh, partition_spec(config, weight.axes, mesh)))
    if stacked:
        kinds = dict(zip(config.mlp_kinds, tree["layers"], strict=True))
        stacks = tuple(
            jax.tree.map(lambda sharding: NamedSharding(mesh, PartitionSpec(None, *sharding.spec)), layer)
            for layer in kinds.values()
        )
        tree["layers"] = stacks[0] if len(stacks) == 1 else stacks
    return tree


def leaf_shardings(sharding: NamedSharding, value: Any) -> Any:
    """Shardings of what is kept at a parameter's place: of its one array, or of the arrays of a `ScaledMatrix`.

    Scales are sharded as their numbers are. Where the blocks of an axis do not divide, neither is; what has one block
    along it is whole on every device.

    Args:
      sharding: of the parameter, from `param_shardings`.
      value: arrays or their shapes.
    """
    if not isinstance(value, ScaledMatrix):
        return sharding
    axes = zip(sharding.spec, value.scales.shape, strict=True)
    spec = [axis if axis is None or count == 1 or count % sharding.mesh.shape[axis] == 0 else None for axis, count in axes]
    scales = [None if count == 1 else axis for axis, count in zip(spec, value.scales.shape, strict=True)]
    numbers_at, scales_at = (NamedSharding(sharding.mesh, PartitionSpec(*each)) for each in (spec, scales))
    return ScaledMatrix(numbers_at, scales_at, None if value.minima is None else scales_at)


def _mesh_axis(config: ModelConfig, axis: str | None, mesh: Mesh) -> str | None:
    mesh_axis = MESH_AXIS_OF[axis] if axis is not None else None
    if mesh_axis is None:
        return None
    sizes = {
        "vocab": config.vocab_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.intermediate_size,
    }
    if (experts := config.experts) is not None:
        if axis in ("expert", "expert_mlp"):
            return mesh_axis if axis == experts.split(mesh.shape[mesh_axis]) else None
        sizes["shared_mlp"] = experts.shared_size
    count = sizes.get(axis or "")
    return mesh_axis if count is None or count % mesh.shape[mesh_axis] == 0 else None
