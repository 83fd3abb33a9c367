"""paged_attention: attention of a few query tokens over K and V that lie in pages of a pool."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp

from pallas_kernels.common import native
from pallas_kernels.paged_attention.checks import check_arguments

_LOG = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, str] = {
    "reference": "pallas_kernels.paged_attention.reference",
    "cpu": "pallas_kernels.paged_attention.cpu",
    "native_cpu": "pallas_kernels.paged_attention.native_cpu",
    "mosaic_gpu": "pallas_kernels.paged_attention.mosaic_gpu",
    "mosaic_tpu": "pallas_kernels.paged_attention.mosaic_tpu",
}
"""The module of every implementation, which holds `paged_attention_NAME`; imported when first chosen."""

KERNELS = ("mosaic_gpu", "mosaic_tpu")
"""The implementations that are Pallas kernels, and so can be interpreted."""

LATENT_IMPLEMENTATIONS = ("reference", "cpu")
"""The implementations that take latent pools; both are plain XLA and run on any device."""


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    scales: jax.Array | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Causal grouped-query attention over a paged KV pool.

    Query head h reads KV head `h * K // H`. Nothing beyond a row's context is read into the result:
    unused pages, page tails and their scales may hold NaN.

    Args:
      q: [T, H, D], query tokens.
      pool: [L, P, 2, K, S, D], keys (0) and values (1); the tokens of this step are in it. Or one of the two
        other forms of `pallas_kernels.common.pool`, which `mosaic_gpu` lacks; or a latent pool (`value_dim`).
      layer: which layer's pages.
      page_table: int32[R, W], page ids of each row; what lies beyond its context is any valid id. Ids are
        not checked here; `check_page_table` does on the host.
      context_lens: int32[R], tokens of the row in the cache, this step's included; 0: padding row.
      query_starts: None: decode, T == R and query i is row i's last token. int32[R + 1]: row r owns
        q[query_starts[r]:query_starts[r + 1]], its last tokens; queries from query_starts[R] on are padding.
      scales: float32[L, P, 2, K, S] of an int8 or float8_e4m3fn pool, one per token and KV head:
        a key or value is what is stored times its scale. None for every other pool.
      scale: of the scores; 1 / sqrt(D) when None.
      sliding_window: a query sees this many latest tokens, itself included; None: all.
      logit_softcap: scores become `cap * tanh(scores / cap)`; None: off.
      sinks: float[H], a logit per head that takes part in the softmax and has no value; -inf or None: off.
      value_dim: of a latent pool [L, P, 1, K, S, D], whose rows are keys and, in their first `value_dim` numbers,
        values; its scales [L, P, 2, K, S] are of these numbers (0) and of the others (1). None for every other pool.
      implementation: a name in `IMPLEMENTATIONS`, or "auto": the best for the default backend.
      interpret: runs the kernel of `mosaic_gpu` or `mosaic_tpu` in Pallas' interpreter, on CPU.

    Returns:
      [T, H, D] in q's dtype, [T, H, value_dim] of a latent pool; zeros for padding.

    Raises:
      ValueError: shapes or dtypes do not fit together, the implementation does not exist, or it is to be
        interpreted and is no kernel.
      ImportError: native_cpu without numba.
      NotImplementedError: the implementation lacks these shapes or dtypes; it names what it supports.
    """
    check_arguments(q, pool, page_table, context_lens, query_starts, scales, sliding_window, sinks, value_dim)
    latent = value_dim is not None
    name = choose_implementation(implementation, jax.default_backend(), jnp.dtype(pool.dtype).name, latent=latent)
    if name == "native_cpu":
        native.require()
    if interpret and name not in KERNELS:
        raise ValueError(f"{name} is no Pallas kernel; interpret=True is for {' and '.join(KERNELS)}")
    return load_implementation(name)(
        q,
        pool,
        jnp.asarray(layer, jnp.int32),
        page_table,
        context_lens,
        query_starts,
        scales=scales,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
        interpret=interpret,
        **({"value_dim": value_dim} if latent else {}),
    )


@lru_cache(maxsize=64)
def choose_implementation(
    implementation: str, backend: str, pool_dtype: str = "float32", *, latent: bool = False
) -> str:
    """The implementation used for a request of `implementation` on `backend`; logged once.

    `auto` is `mosaic_tpu` on TPU and `mosaic_gpu` on NVIDIA GPUs from Hopper on. On CPU it is `native_cpu` where numba
    is installed and the pool's dtype is one of `NATIVE_DTYPES`, else `cpu`. For any other device there is no kernel:
    `cpu`, which is plain XLA, runs there, and the log warns. For a latent pool it is `cpu` on any device, and the log
    says why.

    Raises:
      ValueError: there is none of that name.
      NotImplementedError: it does not take latent pools, and the pool is one.
    """
    if implementation == "auto" and latent:
        _LOG.log(
            logging.INFO if backend == "cpu" else logging.WARNING,
            "paged attention: no kernel takes a latent pool (multi-head latent attention); using plain XLA",
        )
        name = "cpu"
    else:
        name = _best(backend, pool_dtype) if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged attention implementation {implementation!r} does not exist;"
            f" choose auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if latent and name not in LATENT_IMPLEMENTATIONS:
        raise NotImplementedError(
            f"paged attention implementation {name} does not take the latent pool of multi-head latent attention;"
            f" choose auto, {', '.join(LATENT_IMPLEMENTATIONS)}"
        )
    _LOG.info("paged attention: implementation %s on backend %s", name, backend)
    return name


def load_implementation(name: str) -> Callable[..., jax.Array]:
    """The function of implementation `name`; imports its module."""
    return getattr(importlib.import_module(IMPLEMENTATIONS[name]), f"paged_attention_{name}")


def _best(backend: str, pool_dtype: str) -> str:
    if backend == "cpu":
        return "native_cpu" if native.is_available() and pool_dtype in native.NATIVE_DTYPES else "cpu"
    if backend == "tpu":
        return "mosaic_tpu"
    capability = str(getattr(jax.devices(backend)[0], "compute_capability", "none"))
    if capability.split(".")[0].isdigit() and float(capability) >= 9.0:
        return "mosaic_gpu"
    _LOG.warning(
        "paged attention: no kernel for backend %s, compute capability %s; using plain XLA", backend, capability
    )
    return "cpu"
