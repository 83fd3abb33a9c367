"""Shapes that implementations are compiled, checked and timed at: real models, decode and prefill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.pool import pool_shape, scales_shape
from pallas_kernels.paged_attention.api import paged_attention


@dataclass(frozen=True, slots=True)
class Spec:
    """One call's sizes.

    Attributes:
      name: model and phase.
      num_tokens, num_rows: query tokens T and table rows R; equal in decode.
      table_width: pages per row.
      num_heads, num_kv_heads, head_dim: of the model.
      num_layers, num_pages, page_size: of the pool.
      dtype: of queries, and of the pool unless `kv_dtype` says otherwise.
      kv_dtype: of an int8 or float8_e4m3fn pool, which has scales; else empty.
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
    kv_dtype: str = ""

    def pool_shape(self, implementation: str) -> tuple[int, ...]:
        """[L, P, 2, K, S, D], or the form that `implementation` takes instead."""
        sizes = (self.num_layers, self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return pool_shape(*sizes, implementation)

    @property
    def pool_dtype(self) -> Any:
        """Of stored keys and values."""
        return jnp.dtype(self.kv_dtype or self.dtype)

    def pool_bytes(self, implementation: str) -> int:
        """Of the whole pool, scales left out."""
        return math.prod(self.pool_shape(implementation)) * int(self.pool_dtype.itemsize)

    def abstract_args(self, implementation: str) -> tuple[Any, ...]:
        """(q, pool, layer, page_table, context_lens, query_starts, scales) as ShapeDtypeStructs or None."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        pool = self.pool_shape(implementation)
        return (
            jax.ShapeDtypeStruct((self.num_tokens, self.num_heads, self.head_dim), jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct(pool, self.pool_dtype),
            ints(),
            ints(self.num_rows, self.table_width),
            ints(self.num_rows),
            ints(self.num_rows + 1) if self.prefill else None,
            jax.ShapeDtypeStruct(scales_shape(pool), jnp.float32) if self.kv_dtype else None,
        )

    def attend(self, implementation: str) -> Callable[..., jax.Array]:
        """The call, to be traced with `abstract_args`."""

        def call(*args: Any) -> jax.Array:
            return paged_attention(*args[:6], scales=args[6], implementation=implementation)

        return call

    @property
    def kv_bytes(self) -> int:
        """K and V bytes of full rows in one layer: what a decode call has to read."""
        row = 2 * self.num_kv_heads * self.head_dim * int(self.pool_dtype.itemsize)
        return self.num_rows * self.table_width * self.page_size * row


_SMOLLM2_135M = dict(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=30, num_pages=513)
_LLAMA_8B = dict(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32, num_pages=2049)
_GEMMA_12B = dict(num_heads=16, num_kv_heads=8, head_dim=256, num_layers=48, num_pages=2049)
_PHI_3_MINI = dict(num_heads=32, num_kv_heads=32, head_dim=96, num_layers=32, num_pages=1025)
_PAGES_OF_128 = dict(page_size=128, num_pages=257)

SPECS: tuple[Spec, ...] = (
    Spec("smollm2-135m decode", 8, 8, 16, **_SMOLLM2_135M),
    Spec("smollm2-135m decode float32", 8, 8, 16, dtype="float32", **_SMOLLM2_135M),
    Spec("smollm2-135m prefill", 512, 8, 32, prefill=True, **_SMOLLM2_135M),
    Spec("llama-3-8b decode", 64, 64, 128, **_LLAMA_8B),
    Spec("llama-3-8b decode 32k", 8, 8, 2048, **_LLAMA_8B),
    Spec("llama-3-8b prefill", 512, 8, 128, prefill=True, **_LLAMA_8B),
    Spec("llama-3-8b decode pages of 128", 64, 64, 16, **(_LLAMA_8B | _PAGES_OF_128)),
    Spec("llama-3-8b decode int8", 64, 64, 16, kv_dtype="int8", **(_LLAMA_8B | _PAGES_OF_128)),
    Spec("llama-3-8b prefill int8", 512, 8, 16, prefill=True, kv_dtype="int8", **(_LLAMA_8B | _PAGES_OF_128)),
    Spec("llama-3-8b decode fp8", 64, 64, 16, kv_dtype="float8_e4m3fn", **(_LLAMA_8B | _PAGES_OF_128)),
    Spec("gemma-3-12b decode", 64, 64, 128, **_GEMMA_12B),
    Spec("gemma-3-12b prefill", 512, 8, 128, prefill=True, **_GEMMA_12B),
    Spec("phi-3-mini decode", 64, 64, 128, **_PHI_3_MINI),
    Spec("beyond 2**31 elements decode", 64, 64, 128, **(_LLAMA_8B | {"num_pages": 4097})),
)
"""The shapes; names are unique."""
