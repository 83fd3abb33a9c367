"""The KV pool: every page of every layer in one array, with scales beside it if its numbers have 8 bits.

Layers may lie in groups (`jaxserve.models.layer_groups`): a page is then of one group, and the pool as long as a group.

Page-major, so that a page of a layer is contiguous and a kernel copies it whole. KV heads are sharded
over the mesh's "model" axis when they divide by it, else replicated; along an axis "copies" they always are. The pool
is donated to every step and comes back updated in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.models import LayerGroups, ModelConfig, one_group
from jaxserve.runtime.huge_pages import use_huge_pages
from pallas_kernels.common.pool import QUANTISED_DTYPES, pool_shape, scales_shape
from pallas_kernels.paged_attention import choose_implementation

SWAP_BLOCK = 16
"""Pages that one program copies between the pool and the host."""

_DTYPES = {"fp8": "float8_e4m3fn"}
"""Values of `kv_cache_dtype` that jax has another name for."""


class KVPool(NamedTuple):
    """Keys and values of all pages, or of a few of them (then N instead of P).

    Attributes:
      pages: `[L, P, 2, K, S, D]`, L being the layers of a group, or another form of `pallas_kernels.common.pool`; of
        latent attention a latent pool.
      scales: float32 `[L, P, 2, K, S]` of int8 and float8_e4m3fn pages, else None.
    """

    pages: Any
    scales: Any


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What the pool of an engine looks like.

    Attributes:
      config: the model.
      mesh: devices.
      page_size: tokens per page.
      kv_cache_dtype: as in `EngineConfig`; not "auto".
      implementation: of paged attention, as `choose_implementation` gives it: TPU kernels want a form of
        their own where the head dimension is no multiple of 128.
      layer_groups: None: all layers are one group.
    """

    config: ModelConfig
    mesh: Mesh
    page_size: int
    kv_cache_dtype: str
    implementation: str
    layer_groups: LayerGroups | None = None

    @property
    def groups(self) -> LayerGroups:
        """Which layers have pages together."""
        return self.layer_groups or one_group(self.config.sliding_windows)

    @property
    def dtype(self) -> Any:
        """Of stored keys and values."""
        return jnp.dtype(_DTYPES.get(self.kv_cache_dtype, self.kv_cache_dtype))

    @property
    def spec(self) -> PartitionSpec:
        """KV heads over "model" where they divide, else replicated; of pages and of scales."""
        divides = self.config.num_kv_heads % self.mesh.shape["model"] == 0
        return PartitionSpec(None, None, None, "model" if divides else None)

    @property
    def sharding(self) -> NamedSharding:
        """`spec` on the mesh's devices."""
        return NamedSharding(self.mesh, self.spec)

    def abstract(self, num_pages: int) -> KVPool:
        """Shapes, dtypes and shardings of a pool of `num_pages`."""
        config = self.config
        shape = pool_shape(
            self.groups.size,
            num_pages,
            config.num_kv_heads,
            self.page_size,
            config.head_dim,
            self.implementation,
            latent=config.value_dim is not None,
            platform=self.mesh.devices.flat[0].platform,
        )
        pages = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.sharding)
        if self.dtype.name not in QUANTISED_DTYPES:
            return KVPool(pages, None)
        return KVPool(pages, jax.ShapeDtypeStruct(scales_shape(shape), jnp.float32, sharding=self.sharding))

    def bytes_on_a_device(self, num_pages: int) -> int:
        """Of the share of `num_pages` that a device holds."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * int(x.dtype.itemsize)
            for x in jax.tree.leaves(self.abstract(num_pages))
        )

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers of a group, K and V and scales, on all devices together."""
        return sum(math.prod(x.shape) * int(x.dtype.itemsize) for x in jax.tree.leaves(self.abstract(1)))

    def compile_make(self, num_pages: int) -> Callable[[], KVPool]:
        """What makes a zeroed pool, on the devices in its sharding; if that is one CPU, on huge pages if there are."""
        shapes = self.abstract(num_pages)

        def zeros() -> KVPool:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        program = jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, shapes)).lower().compile()
        on_one_cpu = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"

        def make() -> KVPool:
            pool: KVPool = program()
            if on_one_cpu:
                use_huge_pages(pool)
            return pool

        return make

    def make(self, num_pages: int) -> KVPool:
        """A zeroed pool; see `compile_make`."""
        return self.compile_make(num_pages)()


def attention_implementation(config: EngineConfig, model_config: ModelConfig, backend: str) -> str:
    """The implementation of paged attention that an engine's settings come to.

    Raises:
      ValueError: the one that is asked for does not exist or lacks what the model needs.
    """
    pool_dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    latent = model_config.value_dim is not None
    try:
        return choose_implementation(config.attention_implementation, backend, pool_dtype, latent=latent)
    except NotImplementedError as error:
        raise ValueError(f"attention_implementation is {config.attention_implementation}: {error}") from error


def gather_pages(pool: KVPool, ids: jax.Array) -> KVPool:
    """Pages `ids` (int32[N]) of a pool."""
    return jax.tree.map(lambda x: x[:, ids], pool)


def scatter_pages(pool: KVPool, block: KVPool, ids: jax.Array) -> KVPool:
    """The pool with pages `ids` replaced by those of `block`, one slice after another, as that is done in place."""

    def write(index: jax.Array, pool: KVPool) -> KVPool:
        def write_one(x: jax.Array, new: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(new, index, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, ids[index], axis=1)

        return jax.tree.map(write_one, pool, block)

    return jax.lax.fori_loop(0, ids.shape[0], write, pool)
