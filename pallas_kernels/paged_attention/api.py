"""paged_attention: attention of a few query tokens over K and V that lie in pages of a pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference

_LOG = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": paged_attention_reference,
    "cpu": paged_attention_cpu,
}
"""Every implementation by name; all follow the contract of `paged_attention`."""


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal grouped-query attention over a paged KV pool.

    Query head h reads KV head `h * K // H`. Nothing beyond a row's context is read into the result:
    unused pages and page tails may hold NaN.

    Args:
      q: [T, H, D], query tokens.
      pool: [L, P, 2, K, S, D], keys (0) and values (1); the tokens of this step are in it.
      layer: which layer's pages.
      page_table: int32[R, W], page ids of each row; what lies beyond its context is any valid id.
      context_lens: int32[R], tokens of the row in the cache, this step's included; 0: padding row.
      query_starts: None: decode, T == R and query i is row i's last token. int32[R + 1]: row r owns
        q[query_starts[r]:query_starts[r + 1]], its last tokens; queries from query_starts[R] on are padding.
      scale: of the scores; 1 / sqrt(D) when None.
      sliding_window: a query sees this many latest tokens, itself included; None: all.
      logit_softcap: scores become `cap * tanh(scores / cap)`; None: off.
      sinks: float[H], a logit per head that takes part in the softmax and has no value; None: off.
      implementation: a name in `IMPLEMENTATIONS`, or "auto": the best for the default backend.

    Returns:
      [T, H, D] in q's dtype; zeros for padding.

    Raises:
      ValueError: shapes do not fit together, or the implementation does not exist.
    """
    _check(q, pool, page_table, context_lens, query_starts, sliding_window)
    name = choose_implementation(implementation, jax.default_backend())
    return IMPLEMENTATIONS[name](
        q,
        pool,
        jnp.asarray(layer, jnp.int32),
        page_table,
        context_lens,
        query_starts,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )


@lru_cache(maxsize=64)
def choose_implementation(implementation: str, backend: str) -> str:
    """The implementation used for a request of `implementation` on `backend`; logged once.

    Raises:
      ValueError: there is none of that name.
    """
    name = implementation
    if name == "auto":
        name = "cpu" if backend == "cpu" else "reference"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged attention implementation {implementation!r} does not exist;"
            f" choose auto, {', '.join(IMPLEMENTATIONS)}"
        )
    _LOG.info("paged attention: implementation %s on backend %s", name, backend)
    return name


def _check(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array | None,
    sliding_window: int | None,
) -> None:
    if q.ndim != 3 or pool.ndim != 6 or pool.shape[2] != 2:
        raise ValueError(f"q is {q.shape} and pool {pool.shape}; they must be [T, H, D] and [L, P, 2, K, S, D]")
    heads, dim, kv_heads = q.shape[1], q.shape[2], pool.shape[3]
    if dim != pool.shape[5] or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads of {dim} and the pool {kv_heads} of {pool.shape[5]};"
            " sizes must be equal and query heads a multiple of KV heads"
        )
    rows = context_lens.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != rows:
        raise ValueError(f"page_table is {page_table.shape} for {rows} context lengths; it must be [R, W]")
    if query_starts is None and q.shape[0] != rows:
        raise ValueError(f"q has {q.shape[0]} tokens for {rows} rows; without query_starts each row has one")
    if query_starts is not None and query_starts.shape != (rows + 1,):
        raise ValueError(f"query_starts is {query_starts.shape} for {rows} rows; it must be [R + 1]")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for no window")
