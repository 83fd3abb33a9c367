"""The device mesh: axes ("data", "model"), or also "copies"; one device here, more by the same code path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.models import COPIES, ModelConfig, kv_copies


def make_mesh(tensor_parallel_size: int, model_config: ModelConfig | None = None) -> Mesh:
    """A mesh of shape (1, tensor_parallel_size), or of `mesh_of`'s.

    Args:
      model_config: the model, where several devices may hold one KV head.

    Raises:
      ValueError: there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; this machine has {len(devices)}"
            f" {devices[0].platform} device(s)"
        )
    return mesh_of(devices[:tensor_parallel_size], model_config)


def mesh_of(devices: Sequence[Any], model_config: ModelConfig | None = None) -> Mesh:
    """A mesh of all `devices`: ("data", "model"), or with "copies" where a KV head is held by several (`kv_copies`)."""
    copies = 1 if model_config is None else kv_copies(model_config, len(devices))
    array = np.array(devices, dtype=object)
    if copies == 1:
        return Mesh(array.reshape(1, -1), ("data", "model"))
    return Mesh(array.reshape(1, -1, copies), ("data", "model", COPIES))
