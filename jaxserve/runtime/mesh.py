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
