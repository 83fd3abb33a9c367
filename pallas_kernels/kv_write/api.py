"""write_kv: puts the keys and values of new tokens into their pages, in place under donation."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import check_pool_form, check_pool_rows, check_scales
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
      pool: [L, P, 2, K, S, D], or another form of `pallas_kernels.common.pool`; fewer than 2**31 vectors.
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
    kv_heads, dim = pool.shape[3], k.shape[-1]
    tokens = page_ids.shape[0]
    check_pool_form(pool.shape, dim)
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or offsets.shape != (tokens,):
        raise ValueError(
            f"pool {pool.shape}, k {k.shape}, v {v.shape}, page_ids {page_ids.shape} and offsets {offsets.shape}"
            " must be [L, P, 2, K, S, D], [T, K, D], [T, K, D], [T] and [T]"
        )
    check_pool_rows(pool.shape)
    check_scales(pool, scales)
    new = jnp.stack([k, v], axis=1)
    if scales is None:
        return _scatter(pool, layer, page_ids, offsets, _as_stored(pool, new.astype(pool.dtype)))
    stored, new_scales = quantise(new, pool.dtype)
    return (
        _scatter(pool, layer, page_ids, offsets, _as_stored(pool, stored)),
        _scatter(scales, layer, page_ids, offsets, new_scales),
    )


def _as_stored(pool: jax.Array, new: jax.Array) -> jax.Array:
    """[T, 2 or 1, K, E]: what [T, 2, K, D] is in the pool's form."""
    if pool.shape[2] == 1:
        return jnp.concatenate([new[:, :1], new[:, 1:]], axis=-1)
    return jnp.pad(new, ((0, 0), (0, 0), (0, 0), (0, pool.shape[5] - new.shape[3])))


def _scatter(
    array: jax.Array, layer: jax.Array | int, page_ids: jax.Array, offsets: jax.Array, new: jax.Array
) -> jax.Array:
    """`array` [L, P, parts, K, S, ...] with the tokens' places replaced by `new` [T, parts, K, ...]."""
    part = jnp.arange(array.shape[2], dtype=jnp.int32)[None, :, None]
    head = jnp.arange(array.shape[3], dtype=jnp.int32)[None, None, :]
    places = (jnp.asarray(layer, jnp.int32), page_ids[:, None, None], part, head, offsets[:, None, None])
    return array.at[places].set(new, mode="promise_in_bounds")
