"""Sharding: one table from logical axis to mesh axis, for parameters and activations alike.

Attention is split by heads, the MLP by its inner width, experts among devices or, where they do not divide, by
their inner width; embedding and output projection by vocabulary. What does not divide is replicated: correct
everywhere, faster where it divides.

Of more devices than KV heads several hold one head: the mesh then has an axis "copies" beside "model", KV heads are
split over "model" alone, and all else over both (`kv_copies`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.mesh_axes import axis_size, model_axes
from jaxserve.models.weights import make_params

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


def _mesh_axis(config: ModelConfig, axis: str | None, mesh: Mesh) -> str | tuple[str, str] | None:
    mesh_axis: str | tuple[str, str] | None = MESH_AXIS_OF[axis] if axis is not None else None
    if mesh_axis is None:
        return None
    if mesh_axis == "model" and axis != "kv_heads":
        mesh_axis = model_axes(mesh)
    size = axis_size(mesh, mesh_axis)
    sizes = {
        "vocab": config.vocab_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.intermediate_size,
    }
    if (experts := config.experts) is not None:
        if axis in ("expert", "expert_mlp"):
            return mesh_axis if axis == experts.split(size) else None
        sizes["shared_mlp"] = experts.shared_size
    count = sizes.get(axis or "")
    return mesh_axis if count is None or count % size == 0 else None
