"""The KV pool and its scales `[L, P, 2, K, S]`: what shapes and dtypes they may have.

A pool has one of three forms, the last two for TPUs, which keep arrays in rows of 128 numbers, and a head
dimension D that is no multiple of that:
- plain: [L, P, 2, K, S, D];
- padded: [L, P, 2, K, S, E], E the next multiple of 128; zeros beyond D;
- packed: [L, P, 1, K, S, 2 * D], keys, then values, in the last dimension.

A latent pool [L, P, 1, K, S, D] holds one row per token and KV head, which is its key and whose first `value_dim`
numbers are its value (multi-head latent attention in absorbed form, DeepSeek-V2, Liu et al. 2024, section 2.1). Its
scales are [L, P, 2, K, S] too: of those first numbers (0), and of the others (1). On TPUs its rows are padded to a
multiple of 128.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED_DTYPES = ("int8", "float8_e4m3fn")
"""Pool dtypes that come with scales."""


def pool_shape(
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    implementation: str,
    *,
    latent: bool = False,
    platform: str = "cpu",
) -> tuple[int, ...]:
    """The shape of a pool in the form that `implementation` of paged attention takes and that costs least memory.

    Args:
      implementation: a name in `IMPLEMENTATIONS`, not "auto".
      latent: values are a part of keys.
      platform: of the devices; a latent pool's form depends on it, as XLA itself reads it.
    """
    if latent:
        width = -(-head_dim // 128) * 128 if platform == "tpu" else head_dim
        return (num_layers, num_pages, 1, num_kv_heads, page_size, width)
    parts, width = 2, head_dim
    if implementation == "mosaic_tpu" and head_dim % 128:
        parts, width = (2, -(-head_dim // 128) * 128) if 2 * head_dim % 128 else (1, 2 * head_dim)
    return (num_layers, num_pages, parts, num_kv_heads, page_size, width)


def check_pool_form(shape: tuple[int, ...], dim: int, value_dim: int | None = None) -> None:
    """Refuses a pool of `shape` that is none of the three forms for head dimension `dim`.

    Args:
      value_dim: of a latent pool; None for every other.

    Raises:
      ValueError: see above.
    """
    if value_dim is not None:
        forms = ((1, dim), (1, -(-dim // 128) * 128))
        if len(shape) != 6 or (shape[2], shape[5]) not in forms or not 0 < value_dim < dim:
            raise ValueError(
                f"pool is {tuple(shape)} for keys of {dim} numbers with values of {value_dim} in them; it must be"
                " [L, P, 1, K, S, D], or D rounded up to 128, with 0 < value_dim < D"
            )
        return
    forms = ((2, dim), (2, -(-dim // 128) * 128), (1, 2 * dim))
    if len(shape) != 6 or (shape[2], shape[5]) not in forms:
        raise ValueError(
            f"pool is {tuple(shape)} for heads of {dim}; it must be [L, P, 2, K, S, D], [L, P, 2, K, S, D rounded"
            " up to 128] or [L, P, 1, K, S, 2 * D]"
        )


def split_pages(pages: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """K and V [..., K, S, D] of pages [..., 2 or 1, K, S, E] of any form."""
    if pages.shape[-4] == 1:
        return pages[..., 0, :, :, :dim], pages[..., 0, :, :, dim:]
    return pages[..., 0, :, :, :dim], pages[..., 1, :, :, :dim]


def split_latent(rows: jax.Array, value_dim: int, scales: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Keys [..., D] and values [..., value_dim] of float32 rows [..., D] of a latent pool.

    Args:
      scales: float32[..., 2] of an 8-bit pool, else None.
    """
    if scales is not None:
        first, other = rows[..., :value_dim] * scales[..., :1], rows[..., value_dim:] * scales[..., 1:]
        rows = jnp.concatenate([first, other], axis=-1)
    return rows, rows[..., :value_dim]


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
    if scales is not None and (scales.shape != scales_shape(pool.shape) or scales.dtype != jnp.float32):
        raise ValueError(
            f"scales is {scales.dtype}{list(scales.shape)} for a pool {list(pool.shape)};"
            " it must be float32[L, P, 2, K, S]"
        )


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[L, P, 2, K, S] for a pool of `shape`, of any form."""
    return (*shape[:2], 2, *shape[3:5])


def check_pool_rows(shape: tuple[int, ...]) -> None:
    """Refuses a pool whose vectors (all dimensions but the last) an int32 cannot number; its elements may be more.

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
