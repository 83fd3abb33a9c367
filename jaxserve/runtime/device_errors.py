"""What a device's errors mean."""

from __future__ import annotations

from typing import Any

import jax

_EXHAUSTED = "RESOURCE_EXHAUSTED"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory for what was asked of it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and _EXHAUSTED in str(error)
    )


def out_of_memory(where: str) -> jax.errors.JaxRuntimeError:
    """The error of a device without memory, for failpoints."""
    return jax.errors.JaxRuntimeError(f"{_EXHAUSTED}: {where}: the fault plan says so")


def is_sound(arrays: Any) -> bool:
    """Whether none of some arrays is deleted, or the result of what failed; waits for them."""
    if any(array.is_deleted() for array in jax.tree.leaves(arrays)):
        return False
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return True
