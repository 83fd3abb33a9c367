"""What the arguments of paged attention must satisfy; checked while tracing."""

from __future__ import annotations

import jax

from pallas_kernels.common.pool import check_pool_form, check_pool_rows, check_scales


def check_arguments(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    scales: jax.Array | None,
    sliding_window: int | None,
    sinks: jax.Array | None,
    value_dim: int | None,
) -> None:
    """Refuses arguments of `paged_attention` that do not fit together.

    Raises:
      ValueError: what does not fit, with the shapes seen.
    """
    if q.ndim != 3 or pool.ndim != 6:
        raise ValueError(f"q is {q.shape} and pool {pool.shape}; they must be [T, H, D] and [L, P, 2, K, S, D]")
    heads, dim, kv_heads = q.shape[1], q.shape[2], pool.shape[3]
    check_pool_form(pool.shape, dim, value_dim)
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads and the pool {kv_heads}; query heads must be a multiple of KV heads")
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
