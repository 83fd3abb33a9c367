"""write_kv: puts the keys and values of new tokens into their pages, in place under donation."""

from __future__ import annotations

import importlib
from typing import overload

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import QUANTISED_DTYPES, check_pool_form, check_pool_rows, check_scales
from pallas_kernels.kv_write.quantise import quantise

IMPLEMENTATIONS = ("xla", "mosaic_tpu")


@overload
def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array | None,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: None = None,
    *,
    starts: jax.Array | None = None,
    value_dim: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> jax.Array: ...


@overload
def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array | None,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: jax.Array,
    *,
    starts: jax.Array | None = None,
    value_dim: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array | None,
    page_ids: jax.Array,
    offsets: jax.Array,
    scales: jax.Array | None = None,
    *,
    starts: jax.Array | None = None,
    value_dim: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Writes one K and one V vector per token and KV head, rounded to 8 bits if the pool is.

    `xla` is one scatter with an index per dimension but the last. In that form XLA updates a pool that is donated,
    or carried through a loop, in place on CPU, GPU and TPU; README.md names the exceptions. `mosaic_tpu` is a
    kernel for TPU.

    Args:
      pool: [L, P, 2, K, S, D], or another form of `pallas_kernels.common.pool`; fewer than 2**31 vectors.
      layer: which layer's pages.
      k, v: [T, K, D]. v is None for a latent pool, whose rows k are.
      page_ids: int32[T], each in [0, P); page 0 for padding, which may collide, and which `mosaic_tpu` leaves out.
      offsets: int32[T], each in [0, S).
      scales: float32[L, P, 2, K, S] of an int8 or float8_e4m3fn pool; None for every other.
      starts: int32[R + 1]: tokens starts[r] to starts[r + 1] follow each other in a sequence, those from starts[R]
        on are padding, and no two sequences write to one page. None: no two tokens write to one page but page 0.
        `xla` needs neither and does not look.
      value_dim: of a latent pool, as in `paged_attention`; None for every other.
      implementation: a name in `IMPLEMENTATIONS`, or "auto": `choose_write` for the default backend.
      interpret: runs `mosaic_tpu` in Pallas' interpreter, on CPU.

    Returns:
      The pool with the rows replaced; with `scales`, (pool, scales).

    Raises:
      ValueError: shapes or dtypes do not fit together, the pool has too many rows for an int32 index, or the
        implementation does not exist, or it is to be interpreted and is no kernel.
      NotImplementedError: `mosaic_tpu` lacks such a pool: 8 bits, or latent.
    """
    kv_heads, dim = pool.shape[3], k.shape[-1]
    tokens = page_ids.shape[0]
    check_pool_form(pool.shape, dim, value_dim)
    if (v is None) != (value_dim is not None):
        raise ValueError(
            f"v is {'missing' if v is None else 'given'} and value_dim {value_dim}; a latent pool has no v"
        )
    if k.shape != (tokens, kv_heads, dim) or (v is not None and v.shape != k.shape) or offsets.shape != (tokens,):
        raise ValueError(
            f"pool {pool.shape}, k {k.shape}, v {None if v is None else v.shape}, page_ids {page_ids.shape} and"
            f" offsets {offsets.shape} must be [L, P, 2, K, S, D], [T, K, D], [T, K, D], [T] and [T]"
        )
    check_pool_rows(pool.shape)
    check_scales(pool, scales)
    if implementation == "auto":
        on_tpu = value_dim is None and jax.default_backend() == "tpu"
        implementation = choose_write(pool, "mosaic_tpu" if on_tpu else "cpu")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"KV write implementation {implementation!r} does not exist; choose auto, xla or mosaic_tpu")
    if interpret and implementation != "mosaic_tpu":
        raise ValueError(f"{implementation} is no Pallas kernel; interpret=True is for mosaic_tpu")
    if v is None:
        if implementation != "xla":
            raise NotImplementedError("the pool is latent, which mosaic_tpu lacks; xla has it")
        new = k[:, None]
    else:
        new = jnp.stack([k, v], axis=1)
    if scales is not None:
        if implementation != "xla":
            raise NotImplementedError(f"the pool is {pool.dtype}; mosaic_tpu has bfloat16 and float32, xla has all")
        if value_dim is None:
            stored, new_scales = quantise(new, pool.dtype)
            stored = _as_stored(pool, stored)
        else:
            first, other = (quantise(part, pool.dtype) for part in (new[..., :value_dim], new[..., value_dim:]))
            stored = _as_stored(pool, jnp.concatenate([first[0], other[0]], axis=-1))
            new_scales = jnp.concatenate([first[1], other[1]], axis=1)
        return (
            _scatter(pool, layer, page_ids, offsets, stored),
            _scatter(scales, layer, page_ids, offsets, new_scales),
        )
    stored = _as_stored(pool, new.astype(pool.dtype))
    if implementation == "xla":
        return _scatter(pool, layer, page_ids, offsets, stored)
    # Imported when first chosen, as attention kernels are.
    kernel = importlib.import_module("pallas_kernels.kv_write.mosaic_tpu")
    found: jax.Array = kernel.write_kv_mosaic_tpu(pool, layer, stored, page_ids, offsets, starts, interpret)
    return found


def choose_write(pool: jax.Array, attention: str) -> str:
    """The implementation for a pool (its shape and dtype) that the `attention` implementation reads.

    `mosaic_tpu` where attention is, unless the pool has 8 bits: its scales would need a kernel of their own.
    """
    quantised = jnp.dtype(pool.dtype).name in QUANTISED_DTYPES
    return "mosaic_tpu" if attention == "mosaic_tpu" and not quantised else "xla"


def _as_stored(pool: jax.Array, new: jax.Array) -> jax.Array:
    """[T, 2 or 1, K, E]: what [T, 2, K, D], or [T, 1, K, D] of a latent pool, is in the pool's form."""
    if pool.shape[2] < new.shape[1]:
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
