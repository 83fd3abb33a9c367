"""The device mesh: axes ("data", "model"), or also "copies"; one device here, more by the same code path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.models import COPIES, ModelConfig, kv_copies


def make_mesh(tensor_parallel_size: int, model_config: ModelConfig | None = None) -> Mesh:
    """The mesh of `mesh_of` over so many devices; of several processes all of theirs, the first process' first.

    Args:
      model_config: the model, where several devices may hold one KV head; None: every head is held by one, or by all.

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
    return mesh_of(devices[:tensor_parallel_size], model_config)


def mesh_of(devices: Sequence[Any], model_config: ModelConfig | None = None) -> Mesh:
    """A mesh of all `devices`: ("data", "model"), or with "copies" where a KV head is held by several (`kv_copies`)."""
    copies = 1 if model_config is None else kv_copies(model_config, len(devices))
    array = np.array(devices, dtype=object)
    if copies == 1:
        return Mesh(array.reshape(1, -1), ("data", "model"))
    return Mesh(array.reshape(1, -1, copies), ("data", "model", COPIES))
