"""Paged cases for kernels: a scrambled pool that holds NaN wherever nothing may be read, and a dense oracle."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

LAYERS, LAYER = 2, 1


@dataclass
class Case:
    """Inputs of `paged_attention` and, per row, the keys, values and queries they came from."""

    q: np.ndarray
    pool: np.ndarray
    page_table: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray | None
    rows: list

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
    poison=np.nan,
    seed=0,
):
    """A case of one row per context length; 0 is a padding row.

    Args:
      queries: query tokens per row; None: decode.
      width: columns of the page table; as many as the longest row needs when None.
      padding: query tokens that belong to no row.
      poison: fills every slot that holds no token, in used pages' tails, unused pages and other layers.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-context // page_size) for context in contexts]
    width = max([*needed, 1]) if width is None else width
    num_pages = 1 + sum(needed) + 3
    ids = iter(1 + rng.permutation(num_pages - 1))
    pool = np.full((LAYERS, num_pages, 2, kv_heads, page_size, dim), poison, dtype)
    table = np.zeros((len(contexts), width), np.int32)
    rows = []
    for row, context in enumerate(contexts):
        kv = rng.normal(size=(2, context, kv_heads, dim)).astype(dtype)
        count = min(1, context) if queries is None else queries[row]
        rows.append((rng.normal(size=(count, heads, dim)).astype(dtype), *kv))
        table[row, : needed[row]] = [next(ids) for _ in range(needed[row])]
        for token in range(context):
            pool[LAYER, table[row, token // page_size], :, :, token % page_size] = kv[:, token]
    if queries is None:
        q = np.stack([row[0][0] if len(row[0]) else np.full((heads, dim), poison, dtype) for row in rows])
        starts = None
    else:
        q = np.concatenate([*(row[0] for row in rows), np.full((padding, heads, dim), poison, dtype)])
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Case(q, pool, table, np.asarray(contexts, np.int32), starts, rows)


def dense(case, *, scale=None, sliding_window=None, logit_softcap=None, sinks=None):
    """The answer by a loop over rows, queries and heads in float64."""
    out = np.zeros(case.q.shape)
    at = 0
    for q, keys, values in case.rows:
        q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
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


bfloat16 = ml_dtypes.bfloat16
