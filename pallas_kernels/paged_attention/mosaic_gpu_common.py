"""What the Mosaic GPU kernels share: query tiles, page copies, score arithmetic, the layout of shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

LOG2E = math.log2(math.e)
UNSEEN = -1e30
"""Score of a key that a query does not see: finite, so that a row that has seen nothing yet stays finite."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made, static in a kernel.

    Attributes:
      scale: of the products of queries and keys.
      sliding_window, logit_softcap: as in `paged_attention`.
      rows_per_token: query rows of a tile that are of one token, the group size: row `i` is of token
        `i // rows_per_token`. 0: all rows are of one token.
    """

    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    rows_per_token: int

    def logits(self, scores: jax.Array) -> jax.Array:
        """Products of queries and keys, scaled and capped, in units of log2."""
        if self.logit_softcap is None:
            return scores * (self.scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2x)); the hardware's tanh is good to 2**-11 only.
        cap = self.logit_softcap
        return (cap * LOG2E) * (1.0 - 2.0 / (1.0 + jnp.exp2(scores * (2.0 * LOG2E * self.scale / cap))))


class Tile(NamedTuple):
    """The tile a block works on, as scalars.

    Attributes:
      layer, row, head: of the pool, of the page table, of the KV heads.
      first, end: the tokens that any of its queries sees.
      position: of its first query.
    """

    layer: jax.Array
    row: jax.Array
    head: jax.Array
    first: jax.Array
    end: jax.Array
    position: jax.Array

    @classmethod
    def read(cls, layer_ref: Any, bounds_ref: Any, tile: jax.Array, head: jax.Array) -> Tile:
        """Tile `tile` of `bounds_ref` int32[N, 4]: row, first, end, position."""
        row, first, end, position = (bounds_ref[tile, i] for i in range(4))
        return cls(layer_ref[0], row, head, first, end, position)

    def holds(self, token: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Which of the tokens from `token` on along `axis` any query sees; all others may be anything."""
        key = token + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return (key >= self.first) & (key < self.end)

    def sees(
        self, token: jax.Array, shape: tuple[int, int], first_row: jax.Array | int, scoring: Scoring, layout: Any
    ) -> jax.Array:
        """Which of the tokens from `token` on (columns) each query row from `first_row` on sees."""
        seen = self.holds(token, shape, 1, layout)
        if not scoring.rows_per_token:
            return seen
        row = first_row + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        position = across(self.position + row // scoring.rows_per_token, shape, layout)
        key = token + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        seen &= key <= position
        if scoring.sliding_window is not None:
            seen &= key > position - scoring.sliding_window
        return seen


def across(per_row: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """A number per row, [M], in every column of `shape`."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(per_row, shape, (0,)), layout)


def copy_pages(
    pool_ref: Any, page_table_ref: Any, tile: Tile, kind: int, token: jax.Array, smem: Any, barrier: Any
) -> None:
    """Starts the copies of one block of K (`kind` 0) or V (1).

    Pages beyond the tile's last are its last again, so that every block makes the same number of copies.

    Args:
      token: the block's first, a multiple of its size.
      smem: [block, D], where it goes.
      barrier: on which `num_copies` copies arrive.
    """
    page_size, block = pool_ref.shape[4], smem.shape[0]
    piece = min(page_size, block)
    last_page = jnp.maximum(tile.end - 1, 0) // page_size
    for part in range(num_copies(page_size, block)):
        at = token + part * piece
        page = page_table_ref[tile.row, jnp.minimum(at // page_size, last_page)]
        inside = pl.ds(pl.multiple_of(jax.lax.rem(at, page_size), piece), piece)
        source = pool_ref.at[tile.layer, page, kind, tile.head, inside]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(part * piece, piece)], barrier)


def num_copies(page_size: int, block: int) -> int:
    """Copies that bring one block of K or of V."""
    return max(1, block // page_size)


def swizzled(minor: int, dtype: Any = jnp.bfloat16, aligned_rows: int = 8) -> tuple[Any, ...]:
    """The shared-memory layout that TMA copies and matrix loads use without bank conflicts.

    Args:
      minor: length of the last dimension.
      dtype: of the buffer.
      aligned_rows: what the first row of every copy in global memory is a multiple of; a tile has no more rows.
    """
    size = jnp.dtype(dtype).itemsize
    # Accumulators in float32 are stored without conflicts in the narrowest swizzle only.
    swizzle = 32 if dtype == jnp.float32 else next(s for s in (128, 64, 32) if size * minor % s == 0)
    return plgpu.TilingTransform((min(8, aligned_rows), swizzle // size)), plgpu.SwizzleTransform(swizzle)


def num_parts(dtype: Any) -> int:
    """bfloat16 numbers that a number of `dtype` is the sum of; int8 and fp8 fit into one."""
    return 3 if dtype == jnp.float32 else 1


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """x as a sum of `count` bfloat16 numbers; three hold a float32 to 2**-24."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x.astype(jnp.float32) - parts[-1].astype(jnp.float32)
    return parts


def interpreter(interpret: bool) -> Any:
    """The `interpret` argument of `plgpu.kernel`."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None
