"""The KV pool `[L, P, 2, K, S, D]` and its scales `[L, P, 2, K, S]`: what shapes and dtypes they may have."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED_DTYPES = ("int8", "float8_e4m3fn")
"""Pool dtypes that come with scales."""


def check_scales(pool: jax.Array, scales: jax.Array | None) -> None:
    """Refuses a quantised pool without scales, scales beside a float pool, and scales of another shape.

    Raises:
      ValueError: see above.
    """
    quantised = jnp.dtype(pool.dtype).name in QUANTISED_DTYPES
    if quantised != (scales is not None):
        raise ValueError(
            f"pool is {pool.dtype} {'with' if scales is not None else 'without'} scales;"
            f" {' and '.join(QUANTISED_DTYPES)} pools have scales, others none"
        )
    if scales is not None and (scales.shape != pool.shape[:5] or scales.dtype != jnp.float32):
        raise ValueError(
            f"scales is {scales.dtype}{list(scales.shape)} for a pool {list(pool.shape)};"
            " it must be float32[L, P, 2, K, S]"
        )


def check_pool_rows(shape: tuple[int, ...]) -> None:
    """Refuses a pool `[L, P, 2, K, S, D]` whose vectors of D an int32 cannot number; its elements may be more.

    Raises:
      ValueError: there are 2**31 vectors or more.
    """
    num_rows = math.prod(shape[:5])
    if num_rows >= 2**31:
        raise ValueError(
            f"the pool has {num_rows} rows of D numbers; an int32 index reaches 2**31 - 1: use fewer pages"
        )


def check_page_table(page_table: np.ndarray, num_pages: int) -> None:
    """Refuses page ids outside `[0, num_pages)`; on the host, before the table goes to the device.

    Kernels do not check ids: an id out of range reads, or lets `write_kv` write, some other memory.

    Args:
      page_table: int32[...], page ids.
      num_pages: pages of the pool.

    Raises:
      ValueError: where the first bad id stands, and its value.
    """
    ids = np.asarray(page_table)
    bad = (ids < 0) | (ids >= num_pages)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"page_table{list(place)} is {ids[place]}; page ids must be in [0, {num_pages})")
