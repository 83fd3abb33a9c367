"""Block sizes, stages and splits of the Mosaic GPU kernels, chosen from static shapes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200 (`core_count` of XLA's target config)."""

SMEM_PER_SM_BYTES = 233_472
SMEM_PER_BLOCK_BYTES = 232_448
"""Shared memory of one, and the most that one block of it may ask for (the same target config)."""

SMEM_RESERVED_BYTES = 1_024
"""What the driver keeps per resident block (CUDA programming guide, compute capability 9.0)."""


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


def stages_that_fit(block: int, dim: int, itemsize: int, other_bytes: int, blocks_per_sm: int) -> int:
    """The most stages, up to 4, with which `blocks_per_sm` blocks fit on one multiprocessor; at least 2."""
    room = min(SMEM_PER_BLOCK_BYTES, SMEM_PER_SM_BYTES // blocks_per_sm - SMEM_RESERVED_BYTES) - other_bytes
    return max(2, min(4, room // (2 * block * dim * itemsize)))


def tune_mma(
    num_tiles: int, kv_heads: int, max_tokens: int, dim: int, rows: int, q_dtype: object, kv_dtype: object
) -> Tuning:
    """Of the mma kernel.

    Blocks: 64 tokens, the narrowest score tile whose columns four warps share evenly at every layout tried.
    Stages: as many as leave two blocks on a multiprocessor, so that one computes while the other waits.
    Splits: enough for two blocks on each multiprocessor, but at least four K/V blocks (256 tokens) for each,
    below which the second pass costs more than the parallelism gains. These are counts, not measurements.
    """
    block = 64
    q_bytes, kv_bytes = jnp.dtype(q_dtype).itemsize, jnp.dtype(kv_dtype).itemsize
    other = rows * (dim * q_bytes + block * q_bytes + dim * 4) + 4_096
    stages = stages_that_fit(block, dim, kv_bytes, other, blocks_per_sm=2)
    wanted = -(-2 * NUM_SMS // max(1, num_tiles * kv_heads))
    return Tuning(block, stages, max(1, min(wanted, max_tokens // (4 * block), 32)))
