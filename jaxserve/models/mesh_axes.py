"""Mesh axes: which of a mesh's axes split a model, and how many devices hold one KV head."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from jaxserve.models.config import ModelConfig

COPIES = "copies"
"""The mesh axis of devices that hold the same KV heads."""


def kv_copies(config: ModelConfig, num_devices: int) -> int:
    """Devices that hold each KV head, if there are more devices than heads and the heads divide them; else 1.

    Query heads must divide among all devices: those of a device are then of the one KV head that it holds. One KV head
    alone (latents, multi-query attention) is replicated without an axis.
    """
    heads = config.num_kv_heads
    if 1 < heads < num_devices and num_devices % heads == 0 and config.num_heads % num_devices == 0:
        return num_devices // heads
    return 1


def model_axes(mesh: Mesh) -> str | tuple[str, str]:
    """The mesh axes that together split all but KV heads."""
    return ("model", COPIES) if COPIES in mesh.shape else "model"


def axis_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """Devices along one axis, or several together."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
