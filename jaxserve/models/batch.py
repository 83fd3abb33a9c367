"""Batch: what layers may know of the tokens they run and of the devices they run on."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import Mesh


class Batch(NamedTuple):
    """Of one call of `forward`.

    Attributes:
      live: bool[T], false for padding; None: all are live.
      mesh: devices that share the weights, by the rules of `jaxserve.models.sharding`; None: one device has them.
    """

    live: jax.Array | None = None
    mesh: Mesh | None = None


ONE_DEVICE = Batch()
"""All tokens live, on one device."""
