"""The device mesh: axes ("data", "model"); one device here, more by the same code path."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of shape (1, tensor_parallel_size).

    Raises:
      ValueError: there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; this machine has {len(devices)}"
            f" {devices[0].platform} device(s)"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]).reshape(1, -1), ("data", "model"))


def scans_layers(asked: bool | None, mesh: Mesh) -> bool:
    """Whether layers are stacked for a scan; unless asked for, not on CPU, where it would copy each layer's weights."""
    return mesh.devices.flat[0].platform != "cpu" if asked is None else asked
