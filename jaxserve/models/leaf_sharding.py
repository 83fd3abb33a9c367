"""Where the arrays of one parameter lie: one array, or the numbers and scales of a quantised matrix."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.mesh_axes import axis_size
from pallas_kernels.matmul import ScaledMatrix


def leaf_specs(spec: PartitionSpec, value: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of each array at a parameter's place.

    Scales are sharded as their numbers are. Where the blocks of an axis do not divide, neither is; what has one block
    along it is whole on every device.

    Args:
      spec: of the parameter.
      value: an array, a `ScaledMatrix`, or their shapes.

    Returns:
      `spec`, or a `ScaledMatrix` of specs.
    """
    if not isinstance(value, ScaledMatrix):
        return spec
    counts = value.scales.shape
    numbers = [
        axis if axis is None or count == 1 or count % axis_size(mesh, axis) == 0 else None
        for axis, count in zip(spec, counts, strict=True)
    ]
    scales = PartitionSpec(*(None if count == 1 else axis for axis, count in zip(numbers, counts, strict=True)))
    return ScaledMatrix(PartitionSpec(*numbers), scales, None if value.minima is None else scales)


def leaf_shardings(sharding: NamedSharding, value: Any) -> Any:
    """`leaf_specs` as shardings, from a parameter's sharding (`param_shardings`)."""
    mesh = sharding.mesh
    specs = leaf_specs(sharding.spec, value, mesh)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def put_everywhere(arrays: Any, sharding: NamedSharding) -> Any:
    """Host arrays, the same in every process, on all devices of a replicated sharding.

    Where devices belong to several processes, `jax.device_put` has them compare the arrays first, by a collective.
    """
    assert sharding.is_fully_replicated, f"{sharding} is not replicated"
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)

    def put(array: Any) -> jax.Array:
        shards = [jax.device_put(array, device) for device in sorted(sharding.addressable_devices, key=lambda d: d.id)]
        return jax.make_array_from_single_device_arrays(np.shape(array), sharding, shards)

    return jax.tree.map(put, arrays)
