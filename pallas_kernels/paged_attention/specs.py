"""Shapes that implementations are compiled, checked and timed at: real models, decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Spec:
    """One call's sizes.

    Attributes:
      name: model and phase.
      num_tokens, num_rows: query tokens T and table rows R; equal in decode.
      table_width: pages per row.
      num_heads, num_kv_heads, head_dim: of the model.
      num_layers, num_pages, page_size: of the pool.
      dtype: of queries and pool.
      prefill: with `query_starts`.
    """

    name: str
    num_tokens: int
    num_rows: int
    table_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_pages: int
    page_size: int = 16
    dtype: str = "bfloat16"
    prefill: bool = False

    def abstract_args(self) -> tuple[Any, ...]:
        """(q, pool, layer, page_table, context_lens, query_starts) as ShapeDtypeStructs."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        dtype = jnp.dtype(self.dtype)
        pool = (self.num_layers, self.num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)
        return (
            jax.ShapeDtypeStruct((self.num_tokens, self.num_heads, self.head_dim), dtype),
            jax.ShapeDtypeStruct(pool, dtype),
            ints(),
            ints(self.num_rows, self.table_width),
            ints(self.num_rows),
            ints(self.num_rows + 1) if self.prefill else None,
        )

    @property
    def kv_bytes(self) -> int:
        """K and V bytes of full rows in one layer: what a decode call has to read."""
        row = 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return self.num_rows * self.table_width * self.page_size * row


_SMOLLM2_135M = dict(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=30, num_pages=513)
_LLAMA_8B = dict(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32, num_pages=2049)

SPECS: tuple[Spec, ...] = (
    Spec("smollm2-135m decode", 8, 8, 16, **_SMOLLM2_135M),
    Spec("smollm2-135m decode float32", 8, 8, 16, dtype="float32", **_SMOLLM2_135M),
    Spec("smollm2-135m prefill", 512, 8, 32, prefill=True, **_SMOLLM2_135M),
    Spec("llama-3-8b decode", 64, 64, 128, **_LLAMA_8B),
    Spec("llama-3-8b prefill", 512, 8, 128, prefill=True, **_LLAMA_8B),
)
"""The shapes; names are unique."""
