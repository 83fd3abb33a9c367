"""Block sizes, stages and splits of the Mosaic GPU kernels, chosen from static shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200 (`core_count` of XLA's target config)."""

SMEM_PER_SM_BYTES = 233_472
SMEM_PER_BLOCK_BYTES = 232_448
"""Shared memory of one, and the most that one block of it may ask for (the same target config)."""

SMEM_RESERVED_BYTES = 1_024
"""What the driver keeps per resident block (CUDA programming guide, compute capability 9.0)."""


SMEM_FIXED_BYTES = 2_048
"""Barriers, scratch for reductions (`REDUCTION_BYTES`) and alignment: what dumps show beyond the buffers."""

REDUCTION_BYTES = 512
"""Scratch for reductions across warps: 4 warps by 16 rows of float32, twice."""

MMA_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """Attributes:
    block: tokens of K and V per step.
    stages: K/V blocks in flight or in use.
    splits: blocks that share one tile's tokens.
    """

    block: int
    stages: int
    splits: int


def stages_that_fit(stage_bytes: int, other_bytes: int, blocks_per_sm: int) -> int:
    """The most stages, from 2 to 4, with which that many blocks, or else one, fit on a multiprocessor.

    Raises:
      NotImplementedError: two stages do not fit.
    """
    for blocks in range(blocks_per_sm, 0, -1):
        room = min(SMEM_PER_BLOCK_BYTES, SMEM_PER_SM_BYTES // blocks - SMEM_RESERVED_BYTES)
        stages = (room - SMEM_FIXED_BYTES - other_bytes) // stage_bytes
        if stages >= 2:
            return min(4, stages)
    raise NotImplementedError(
        f"two stages of {stage_bytes} bytes beside {other_bytes} do not fit into the {SMEM_PER_BLOCK_BYTES} bytes of"
        " a block's shared memory; mosaic_gpu has fewer query heads to a KV head, or smaller heads"
    )


def tune_mma(num_tiles: int, max_tokens: int, pool: jax.Array, rows: int, q_dtype: Any) -> Tuning:
    """Of the mma kernel; `num_tiles` tiles of `rows` query rows, tables of `max_tokens` tokens.

    Block: 64 tokens; of 32, four warps share the columns unevenly and it does not compile.
    Splits: enough for two blocks on each multiprocessor, but at least four K/V blocks (256 tokens) for each,
    and 32 at most.
    Stages: as many as leave room for two blocks on a multiprocessor, so that one computes while the other waits.
    These are counts from the sizes of the hardware, not measurements.
    """
    kv_heads, dim = pool.shape[3], pool.shape[5]
    wanted = -(-2 * NUM_SMS // max(1, num_tiles * kv_heads))
    splits = max(1, min(wanted, max_tokens // (4 * MMA_BLOCK), 32))
    scaled = pool.dtype.itemsize == 1
    q_parts = 3 if q_dtype == jnp.float32 else 1
    out_bytes = 4 if splits > 1 or q_dtype == jnp.float32 else 2
    queries = 2 * q_parts * rows * dim
    weights = 2 * max(q_parts, 1 + scaled) * rows * MMA_BLOCK
    widened = 0 if pool.dtype == jnp.bfloat16 else 2 * (1 if scaled else 3) * MMA_BLOCK * dim
    other = queries + weights + widened + rows * (dim * out_bytes + 4)
    stage = MMA_BLOCK * (2 * dim * pool.dtype.itemsize + 8 * scaled)
    return Tuning(MMA_BLOCK, stages_that_fit(stage, other, blocks_per_sm=2), splits)


def tune_wgmma(dim: int) -> Tuning:
    """Of the WGMMA kernel: 128 tokens per step for D = 64; 64 for more, where scores of 128 spill registers."""
    block = 128 if dim <= 64 else 64
    return Tuning(block, stages_that_fit(4 * block * dim, 4 * 64 * dim, blocks_per_sm=1), 1)
