"""write_kv: puts the keys and values of new tokens into their pages, in place under donation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(
    pool: jax.Array, layer: jax.Array | int, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Writes one K and one V vector per token and KV head.

    The pool is seen as rows of D numbers and the new rows are scattered into it, which stays in place when
    the pool is donated or carried through a loop. An update along the page's own dimensions does not
    always: XLA for TPU copies the pool of 8 float32 heads and pages of 32. With one KV head it is the other
    way round, XLA for CPU copies the pool to see it as rows, so that case is updated along its dimensions.

    Args:
      pool: [L, P, 2, K, S, D]; not more than 2**31 - 1 rows of D.
      layer: which layer's pages.
      k, v: [T, K, D].
      page_ids: int32[T], each in [0, P); page 0 for padding, which may collide.
      offsets: int32[T], each in [0, S).

    Returns:
      The pool with the rows replaced.

    Raises:
      ValueError: shapes do not fit together, or the pool has too many rows for an int32 index.
    """
    num_layers, num_pages, two, kv_heads, page_size, dim = pool.shape
    tokens = page_ids.shape[0]
    if two != 2 or k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or offsets.shape != (tokens,):
        raise ValueError(
            f"pool {pool.shape}, k {k.shape}, v {v.shape}, page_ids {page_ids.shape} and offsets {offsets.shape}"
            " must be [L, P, 2, K, S, D], [T, K, D], [T, K, D], [T] and [T]"
        )
    num_rows = num_layers * num_pages * 2 * kv_heads * page_size
    if num_rows >= 2**31:
        raise ValueError(
            f"the pool has {num_rows} rows of D numbers; an int32 index reaches 2**31 - 1: use fewer pages"
        )
    new = jnp.stack([k, v], axis=1).astype(pool.dtype)
    if kv_heads == 1:
        return pool.at[layer, page_ids, :, :, offsets].set(new, mode="promise_in_bounds")
    page = (jnp.asarray(layer, jnp.int32) * num_pages + page_ids)[:, None, None]
    part = jnp.arange(2, dtype=jnp.int32)[None, :, None]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :]
    rows = ((page * 2 + part) * kv_heads + head) * page_size + offsets[:, None, None]
    flat = pool.reshape(-1, dim).at[rows.reshape(-1)].set(new.reshape(-1, dim), mode="promise_in_bounds")
    return flat.reshape(pool.shape)
