"""The device mesh: axes ("data", "model"); one device here, more by the same code path."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of shape (1, tensor_parallel_size).

    Of several processes the mesh has all devices, the first process' first.

    Raises:
      ValueError: there are fewer devices, or several processes have more.
    """
    devices, processes = jax.devices(), jax.process_count()
    if processes > 1 and len(devices) != tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; the {processes} processes have {len(devices)}"
            f" {devices[0].platform} device(s) together, and all of them hold the model: set it to {len(devices)}"
        )
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; this machine has {len(devices)}"
            f" {devices[0].platform} device(s)"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]).reshape(1, -1), ("data", "model"))
