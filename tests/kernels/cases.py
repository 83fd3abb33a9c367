"""Paged cases for kernels: a scrambled pool with poison wherever nothing may be read, and a dense oracle."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

LAYERS, LAYER = 2, 1
bfloat16 = ml_dtypes.bfloat16
float8 = ml_dtypes.float8_e4m3fn
QUANTISED = {"int8": np.int8, "float8_e4m3fn": float8}


@dataclass
class Case:
    """Inputs of `paged_attention` and, per row, the queries and float64 keys and values they stand for."""

    q: np.ndarray
    pool: np.ndarray
    scales: np.ndarray | None
    page_table: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray | None
    rows: list
    value_dim: int | None = None

    def args(self):
        starts = None if self.query_starts is None else jnp.asarray(self.query_starts)
        return (
            jnp.asarray(self.q),
            jnp.asarray(self.pool),
            jnp.asarray(LAYER, jnp.int32),
            jnp.asarray(self.page_table),
            jnp.asarray(self.context_lens),
            starts,
        )

    @property
    def value_range(self):
        """The largest magnitude among the values, which no output exceeds."""
        return max((np.abs(values).max(initial=0.0) for _, _, values in self.rows), default=0.0)


def make_case(
    contexts,
    queries=None,
    *,
    page_size=4,
    heads=4,
    kv_heads=2,
    dim=8,
    width=None,
    padding=0,
    dtype=np.float32,
    quantised=None,
    poison=np.nan,
    poisoned="kv",
    shared_pages=0,
    spare_pages=3,
    value_dim=None,
    seed=0,
):
    """A case of one row per context length; 0 is a padding row. The pool's first and last page are in use.

    Args:
      queries: query tokens per row; None: decode.
      width: columns of the page table; as many as the longest row needs when None.
      padding: query tokens that belong to no row.
      dtype: of queries, and of the pool unless it is quantised.
      quantised: a name in `QUANTISED`; scales are drawn, so K and V are independent of each other.
      poison: fills every slot that holds no token, in used pages' tails, unused pages and other layers;
        in an int8 pool, which cannot hold it, the largest number stands there and the poison in the scales.
      poisoned: "k", "v" or "kv", the parts that are poisoned; zeros in the other.
      shared_pages: whole pages at each row's beginning that are the first row's, where both are as long.
      spare_pages: pages no row has.
      value_dim: the pool is a latent one.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-context // page_size) for context in contexts]
    width = max([*needed, 1]) if width is None else width
    num_pages = sum(needed) + spare_pages
    ids = _page_ids(rng, sum(needed), num_pages)
    parts = 2 if value_dim is None else 1
    shape = (LAYERS, num_pages, parts, kv_heads, page_size, dim)
    pool, scales = _poisoned_pool(shape, dtype, quantised, poison, poisoned)
    # Beyond a row's pages the table may hold any valid id.
    table = rng.integers(0, num_pages, (len(contexts), width)).astype(np.int32)
    rows = []
    for row, context in enumerate(contexts):
        count = min(1, context) if queries is None else queries[row]
        table[row, : needed[row]] = [ids.pop() for _ in range(needed[row])]
        kv = _stored(rng, (parts, context, kv_heads, dim), pool.dtype)
        kv_scales = rng.uniform(0.3, 1.5, (2, context, kv_heads)) / _largest(pool.dtype)
        kv_scales = kv_scales.astype(np.float32)
        full = min(shared_pages, context // page_size, contexts[0] // page_size)
        table[row, :full] = table[0, :full]
        for token in range(context):
            place = (LAYER, table[row, token // page_size], slice(None), slice(None), token % page_size)
            if row and token < full * page_size:
                kv[:, token] = pool[place]
                kv_scales[:, token] = 1.0 if scales is None else scales[place]
            pool[place] = kv[:, token]
            if scales is not None:
                scales[place] = kv_scales[:, token]
        exact = kv.astype(np.float64)
        if value_dim is not None:
            own = np.ones((2, context, kv_heads)) if scales is None else kv_scales.astype(np.float64)
            exact = exact[0] * np.where(np.arange(dim) < value_dim, own[0, ..., None], own[1, ..., None])
            exact = (exact, exact[..., :value_dim])
        elif scales is not None:
            exact *= kv_scales[..., None].astype(np.float64)
        rows.append((rng.normal(size=(count, heads, dim)).astype(dtype), *exact))
    if queries is None:
        q = np.stack([row[0][0] if len(row[0]) else np.full((heads, dim), poison, dtype) for row in rows])
        starts = None
    else:
        q = np.concatenate([*(row[0] for row in rows), np.full((padding, heads, dim), poison, dtype)])
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Case(q, pool, scales, table, np.asarray(contexts, np.int32), starts, rows, value_dim)


def _page_ids(rng, used, num_pages):
    """A shuffled list of `used` ids, the pool's first and last page among them where there are two."""
    if used < 2:
        return list(rng.permutation(num_pages)[:used])
    inner = 1 + rng.permutation(num_pages - 2)[: used - 2]
    return list(rng.permutation([0, *inner, num_pages - 1]))


def _poisoned_pool(shape, dtype, quantised, poison, poisoned):
    """A pool without tokens, and its scales or None."""
    parts = ["kv".index(part) for part in poisoned] if shape[2] == 2 else [0]
    pool = np.zeros(shape, QUANTISED.get(quantised, dtype))
    if quantised == "int8":
        pool[:, :, parts] = 127
    elif quantised:
        pool[:, :, parts] = np.nan  # there is no infinity
    else:
        pool[:, :, parts] = poison
    if not quantised:
        return pool, None
    scales = np.zeros((*shape[:2], 2, *shape[3:5]), np.float32)
    scales[:, :, parts if shape[2] == 2 else slice(None)] = poison
    return pool, scales


def _stored(rng, shape, dtype):
    """Random numbers as a pool of `dtype` holds them."""
    if dtype == np.int8:
        return rng.integers(-127, 128, shape).astype(np.int8)
    return (rng.normal(size=shape) * (60.0 if dtype == float8 else 1.0)).astype(dtype)


def _largest(dtype):
    """About the size that a drawn scale brings to 1."""
    return {np.dtype(np.int8): 64.0, np.dtype(float8): 60.0}.get(np.dtype(dtype), 1.0)


def dense(case, *, scale=None, sliding_window=None, logit_softcap=None, sinks=None):
    """The answer by a loop over rows, queries and heads in float64."""
    out = np.zeros((*case.q.shape[:2], case.value_dim or case.q.shape[2]))
    at = 0
    for q, keys, values in case.rows:
        q = q.astype(np.float64)
        context, kv_heads, dim = keys.shape
        for index in range(len(q)):
            position = context - len(q) + index
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(q.shape[1]):
                kv_head = head * kv_heads // q.shape[1]
                scores = keys[first : position + 1, kv_head] @ q[index, head] * (scale or dim**-0.5)
                if logit_softcap is not None:
                    scores = logit_softcap * np.tanh(scores / logit_softcap)
                extra = -np.inf if sinks is None else sinks[head]
                top = max(scores.max(), extra)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(extra - top)
                out[at + index, head] = weights @ values[first : position + 1, kv_head] / total
        at += max(len(q), 1) if case.query_starts is None else len(q)
    return out
