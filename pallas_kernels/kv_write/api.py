"""write_kv: puts the keys and values of new tokens into their pages, in place under donation."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import check_pool_rows, check_scales
from pallas_kernels.kv_write.quantise import quantise


@overload
def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: None = None,
) -> jax.Array: ...


@overload
def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: jax.Array,
) -> tuple[jax.Array, jax.Array]: ...


def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Writes one K and one V vector per token and KV head, rounded to 8 bits if the pool is.

    One scatter with an index per dimension but the last. In that form XLA updates a pool that is donated,
    or carried through a loop, in place on CPU, GPU and TPU; README.md names the exceptions.

    Args:
      pool: [L, P, 2, K, S, D]; not more than 2**31 - 1 rows of D.
      layer: which layer's pages.
      k, v: [T, K, D].
      page_ids: int32[T], each in [0, P); page 0 for padding, which may collide.
      offsets: int32[T], each in [0, S).
      scales: float32[L, P, 2, K, S] of an int8 or float8_e4m3fn pool; None for every other.

    Returns:
      The pool with the rows replaced; with `scales`, (pool, scales).

    Raises:
      ValueError: shapes or dtypes do not fit together, or the pool has too many rows for an int32 index.
    """
    kv_heads, _, dim = pool.shape[3:]
    tokens = page_ids.shape[0]
    if pool.shape[2] != 2 or k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or offsets.shape != (tokens,):
        raise ValueError(
            f"pool {pool.shape}, k {k.shape}, v {v.shape}, page_ids {page_ids.shape} and offsets {offsets.shape}"
            " must be [L, P, 2, K, S, D], [T, K, D], [T, K, D], [T] and [T]"
        )
    check_pool_rows(pool.shape)
    check_scales(pool, scales)
    part = jnp.arange(2, dtype=jnp.int32)[None, :, None]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :]
    places = (jnp.asarray(layer, jnp.int32), page_ids[:, None, None], part, head, offsets[:, None, None])
    new = jnp.stack([k, v], axis=1)
    if scales is None:
        return pool.at[places].set(new.astype(pool.dtype), mode="promise_in_bounds")
    stored, new_scales = quantise(new, pool.dtype)
    return (
        pool.at[places].set(stored, mode="promise_in_bounds"),
        scales.at[places].set(new_scales, mode="promise_in_bounds"),
    )
