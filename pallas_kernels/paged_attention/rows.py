"""Which table row a query token belongs to, and its position in that row's sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_rows(num_tokens: int, context_lens: jax.Array, query_starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Row and position of each query token.

    Args:
      num_tokens: T.
      context_lens: int32[R].
      query_starts: int32[R + 1], or None for one token per row (T == R).

    Returns:
      (rows int32[T], positions int32[T]); the position is -1 for padding.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    if query_starts is None:
        return tokens, context_lens - 1
    # Rows without tokens share their start with the next row: the last of equals owns the token.
    rows = jnp.searchsorted(query_starts, tokens, side="right").astype(jnp.int32) - 1
    inside = rows < context_lens.shape[0]
    rows = jnp.clip(rows, 0, context_lens.shape[0] - 1)
    positions = context_lens[rows] - (query_starts[rows + 1] - tokens)
    return rows, jnp.where(inside & (context_lens[rows] > 0), positions, -1)
