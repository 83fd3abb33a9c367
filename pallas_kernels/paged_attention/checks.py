"""What calls of paged attention must satisfy: shapes and dtypes while tracing, page ids on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED_DTYPES = ("int8", "float8_e4m3fn")
"""Pool dtypes that come with scales."""


def check_arguments(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    scales: jax.Array | None,
    sliding_window: int | None,
    sinks: jax.Array | None,
) -> None:
    """Refuses arguments of `paged_attention` that do not fit together.

    Raises:
      ValueError: what does not fit, with the shapes seen.
    """
    if q.ndim != 3 or pool.ndim != 6 or pool.shape[2] != 2:
        raise ValueError(f"q is {q.shape} and pool {pool.shape}; they must be [T, H, D] and [L, P, 2, K, S, D]")
    heads, dim, kv_heads = q.shape[1], q.shape[2], pool.shape[3]
    if dim != pool.shape[5] or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads of {dim} and the pool {kv_heads} of {pool.shape[5]};"
            " sizes must be equal and query heads a multiple of KV heads"
        )
    check_pool_rows(pool.shape)
    check_scales(pool, scales)
    rows = context_lens.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != rows:
        raise ValueError(f"page_table is {page_table.shape} for {rows} context lengths; it must be [R, W]")
    if query_starts is None and q.shape[0] != rows:
        raise ValueError(f"q has {q.shape[0]} tokens for {rows} rows; without query_starts each row has one")
    if query_starts is not None and query_starts.shape != (rows + 1,):
        raise ValueError(f"query_starts is {query_starts.shape} for {rows} rows; it must be [R + 1]")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for no window")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks is {sinks.shape} for {heads} query heads; it must be [H]")


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
    num_rows = int(np.prod(shape[:5], dtype=np.int64))
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
