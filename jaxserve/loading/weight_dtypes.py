"""Matrices of 16 bits beside activations of float32: which of a model's weights are kept so.

A number of 16 bits is a float32 too, so products with such a matrix are those of its float32 numbers, at half the
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.loading.checkpoint import CheckpointReader
from jaxserve.loading.quantised_weights import matrix_shape
from jaxserve.models.weights import Weight
from pallas_kernels.matmul import can_pack

Dtypes = dict[tuple[str | int, ...], np.dtype[Any]]
"""The dtype of every weight that is kept in 16 bits though `dtype` is float32, by path."""

_HALVES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def kept_dtypes(
    weight_dtype: str | None,
    dtype: str,
    table: Sequence[Weight],
    forms: Mapping[Any, Any],
    reader: CheckpointReader | None,
) -> Dtypes:
    """Which matrices are kept in another dtype than `dtype`.

    A dtype takes every matrix that is not quantised. "auto" takes those that the checkpoint has in 16 bits, so that
    nothing is rounded, where that costs no time: those that can be packed, and an embedding that is only looked up. Of
    the layers it takes all or none, so that they can still be one call.

    Args:
      weight_dtype: as the flag has it; None: `dtype`.
      forms: of quantised weights, by path.
      reader: of the checkpoint; None for one without, of which "auto" takes nothing.
    """
    if weight_dtype in (None, dtype) or dtype != "float32":
        return {}
    matrices = [w for w in table if w.is_matrix and not w.is_float32 and w.path not in forms]
    if weight_dtype != "auto":
        return {weight.path: np.dtype(jnp.dtype(weight_dtype)) for weight in matrices}
    if reader is None:
        return {}
    is_only_looked_up = {("embed",)} if any(weight.path == ("lm_head",) for weight in table) else set()
    stored = {weight.path: reader.dtype(weight.hf_name) for weight in matrices}
    layers_differ = len({found for path, found in stored.items() if path[0] == "layers"}) > 1
    kept: Dtypes = {}
    for weight in matrices:
        path, found = weight.path, stored[weight.path]
        if found not in _HALVES or (layers_differ and path[0] == "layers"):
            continue
        if path in is_only_looked_up or can_pack(matrix_shape(weight), jnp.dtype(found)):
            kept[path] = found
    return kept


def check_range(weight: Weight, value: np.ndarray[Any, Any] | jax.Array) -> None:
    """Raises ValueError if numbers of a weight were too large for float16, which it was made."""
    finite = jnp.isfinite if isinstance(value, jax.Array) else np.isfinite
    if value.dtype == np.float16 and not bool(finite(value).all()):
        raise ValueError(
            f"{weight.hf_name} has numbers that float16 does not hold, whose largest is {np.finfo(np.float16).max:g};"
            " use weight_dtype bfloat16 or auto"
        )
