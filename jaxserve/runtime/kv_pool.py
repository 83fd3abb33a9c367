"""The KV pool: one array `[L, P, 2, K, S, D]` that holds every page of every layer.

Page-major, so that a page of a layer is contiguous and a kernel copies it whole. KV heads are sharded
over the mesh's "model" axis when they divide by it, else replicated. The pool is donated to every step
and comes back updated in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models import ModelConfig

SWAP_BLOCK = 16
"""Pages that one program copies between the pool and the host."""


def pool_shape(config: ModelConfig, num_pages: int, page_size: int) -> tuple[int, ...]:
    """`[L, P, 2, K, S, D]`."""
    return (config.num_layers, num_pages, 2, config.num_kv_heads, page_size, config.head_dim)


def pool_spec(config: ModelConfig, mesh: Mesh) -> PartitionSpec:
    """KV heads over "model" where they divide, else replicated."""
    divides = config.num_kv_heads % mesh.shape["model"] == 0
    return PartitionSpec(None, None, None, "model" if divides else None)


def pool_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """`pool_spec` on the mesh's devices."""
    return NamedSharding(mesh, pool_spec(config, mesh))


def make_pool(config: ModelConfig, num_pages: int, page_size: int, dtype: str, mesh: Mesh) -> jax.Array:
    """A zeroed pool, made on the devices in its sharding."""
    shape = pool_shape(config, num_pages, page_size)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=pool_sharding(config, mesh))()


def gather_pages(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """`[L, N, 2, K, S, D]`: pages `ids` (int32[N]) of a pool `[L, P, 2, K, S, D]`."""
    return pool[:, ids]


def scatter_pages(pool: jax.Array, block: jax.Array, ids: jax.Array) -> jax.Array:
    """The pool with pages `ids` replaced by those of `block`, one slice after another, as that is done in place."""

    def write(index: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(block, index, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, ids[index], axis=1)

    return jax.lax.fori_loop(0, ids.shape[0], write, pool)
