"""The mma kernel: split-K flash attention of small query tiles over pages, one warpgroup a block.

It serves decode on every target that has TMA, and prefill where the WGMMA kernel does not.

A *tile* is up to `M` = 16, 32 or 64 query rows that share a KV head: the query heads of one group for one
token (decode) or for several consecutive tokens of one sequence (prefill; row `i` is token `i // G`).
Block (tile, KV head, split) reads the K/V blocks of its share of the tile's tokens through TMA into a
ring of `stages` buffers, and keeps a running maximum, sum and output in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_attention.mosaic_gpu_common import (
    LOG2E,
    UNSEEN,
    Scoring,
    Tile,
    across,
    bfloat16_parts,
    copy_pages,
    interpreter,
    num_copies,
    num_parts,
    swizzled,
)
from pallas_kernels.paged_attention.mosaic_gpu_tuning import REDUCTION_BYTES

ROWS_KEPT = (4, 8, 16, 32, 64)
"""Rows that a tile may have in global memory: copies of tiled shared memory must begin at a multiple of a tile."""


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """What is static in one compiled mma kernel.

    Attributes:
      rows: M, query rows a tile holds in registers: 16, 32 or 64.
      rows_kept: rows of a tile in global memory, one of `ROWS_KEPT`; the rest, up to M, belong to other tiles.
      block: tokens of K and V per step.
      stages: buffers in the ring.
      splits: blocks that share a tile's tokens; more than one: partial results.
      scoring: how scores are made.
      interpret: runs without mma, through `jnp.dot`.
    """

    rows: int
    rows_kept: int
    block: int
    stages: int
    splits: int
    scoring: Scoring
    interpret: bool


class Tiles(NamedTuple):
    """Query tiles and which tokens they see.

    Attributes:
      q: bfloat16[parts, X, D], all query rows in parts that add up; tile n of KV head h begins at row
        (n * K + h) * rows_kept.
      bounds: int32[N, 4]: table row, first and end of the tokens that any query of the tile sees,
        position of the first query.
    """

    q: jax.Array
    bounds: jax.Array


def mma_attention(
    tiles: Tiles,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    scales: jax.Array | None,
    sinks: jax.Array | None,
    config: MmaConfig,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel.

    Args:
      tiles: N query tiles.
      pool: [L, P, 2, K, S, D].
      layer: int32[1].
      page_table: int32[R, W].
      scales: float32[R * K, 2, >= W * S rounded up to blocks] of every row's tokens, or None.
      sinks: float32[splits, K, M], one per query row in units of log2, or None. `UNSEEN` in all splits but
        one, so that a sink counts once.
      config: see `MmaConfig`.
      out_dtype: of the result when there is one split; partial results are float32.

    Returns:
      With one split: ([N * K * rows_kept, D], None). With more: outputs [splits, N * K * rows_kept, D]
      and the log2 of each row's sum of exponentials [splits, N * K, M], for `combine_splits`.
    """
    num_tiles, kv_heads, dim = tiles.bounds.shape[0], pool.shape[3], pool.shape[5]
    rows_out = num_tiles * kv_heads * config.rows_kept
    partial = config.splits > 1
    out_types = [jax.ShapeDtypeStruct((config.splits, rows_out, dim), jnp.float32 if partial else out_dtype)]
    if partial:
        out_types.append(jax.ShapeDtypeStruct((config.splits, num_tiles * kv_heads, config.rows), jnp.float32))
    inputs = [tiles.q, pool, layer, page_table, tiles.bounds]
    inputs += [x for x in (scales, sinks) if x is not None]

    def body(*refs: Any) -> None:
        operands, rest = refs[: len(inputs)], refs[len(inputs) :]
        outputs, scratch = rest[: len(out_types)], rest[len(out_types) :]
        extra = list(operands[5:])
        scales_ref = extra.pop(0) if scales is not None else None
        sinks_ref = extra.pop(0) if sinks is not None else None
        out_ref, lse_ref = (*outputs, None)[:2]
        refs_ = _Refs(*operands[:5], scales_ref, sinks_ref, out_ref, lse_ref, *scratch)
        _Block(config, refs_).run()

    outs = plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=_scratch(config, pool, tiles.q.shape[0], out_types[0].dtype, scales is not None),
        grid=(config.splits, kv_heads, num_tiles),
        grid_names=("split", "kv_head", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=interpreter(config.interpret),
    )(*inputs)
    return (outs[0], outs[1]) if partial else (outs[0][0], None)


def _scratch(config: MmaConfig, pool: jax.Array, q_parts: int, out_dtype: Any, scaled: bool) -> list[Any]:
    """Shared memory and barriers, in the order of `_Refs`."""
    page_size, dim = pool.shape[4:]
    copies = num_copies(page_size, config.block)
    staged = pool.dtype != jnp.bfloat16
    kv = plgpu.SMEM((config.stages, config.block, dim), pool.dtype, transforms=() if staged else swizzled(dim))
    parts = (num_parts(pool.dtype), config.block, dim)
    p_parts = max(q_parts, 1 + scaled)  # The scales of V are folded into P and would be rounded with it.
    return [
        plgpu.SMEM((q_parts, config.rows, dim), jnp.bfloat16, transforms=swizzled(dim, aligned_rows=config.rows_kept)),
        kv,
        kv,
        plgpu.SMEM(parts, jnp.bfloat16, transforms=swizzled(dim)) if staged else None,
        plgpu.SMEM((config.stages, 2, config.block), jnp.float32) if scaled else None,
        plgpu.SMEM((p_parts, config.rows, config.block), jnp.bfloat16, transforms=swizzled(config.block)),
        plgpu.SMEM((config.rows, dim), out_dtype, transforms=swizzled(dim, out_dtype, config.rows_kept)),
        plgpu.SMEM((config.rows,), jnp.float32),
        plgpu.Barrier(num_arrivals=q_parts),
        plgpu.Barrier(num_arrivals=copies + scaled, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
    ]


class _Refs(NamedTuple):
    """Operands, results and scratch of the kernel body."""

    q: Any
    pool: Any
    layer: Any
    page_table: Any
    bounds: Any
    scales: Any
    sinks: Any
    out: Any
    lse: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    parts_smem: Any
    scales_smem: Any
    p_smem: Any
    out_smem: Any
    lse_smem: Any
    q_barrier: Any
    k_barriers: Any
    v_barriers: Any


class _Softmax(NamedTuple):
    """Running softmax of a tile, in units of log2: maxima [M], sums [M, block] by column, outputs [M, D]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


class _Block:
    """The body of one block: methods run while the kernel is traced."""

    def __init__(self, config: MmaConfig, refs: _Refs) -> None:
        self.config, self.refs = config, refs
        self.split, head, number = (jax.lax.axis_index(name) for name in ("split", "kv_head", "tile"))
        self.tile = Tile.read(refs.layer, refs.bounds, number, head)
        self.kv_heads, _, self.dim = refs.pool.shape[3:]
        self.tile_head = number * self.kv_heads + head
        self.q_start = self.tile_head * config.rows_kept
        m_warps = config.rows // 16
        self.lhs = plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=m_warps)
        self.rhs = plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=m_warps)
        self.acc = plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=m_warps)

    def run(self) -> None:
        """Everything: starts the copies, goes over this split's blocks, writes the result."""
        refs, config = self.refs, self.config
        begin, end = self._my_blocks()
        q_rows = pl.ds(self.q_start, config.rows)
        for part in range(refs.q.shape[0]):
            plgpu.copy_gmem_to_smem(refs.q.at[part, q_rows], refs.q_smem.at[part], refs.q_barrier)
        for ahead in range(config.stages - 1):
            pl.when(begin + ahead < end)(lambda ahead=ahead: self._copy_block(begin + ahead, ahead))
        plgpu.barrier_wait(refs.q_barrier)
        load_q = self._queries()

        def step(index: jax.Array, state: _Softmax) -> _Softmax:
            slot = jax.lax.rem(index - begin, config.stages)
            ahead = index + config.stages - 1

            @pl.when(ahead < end)
            def _() -> None:
                # The last step's reads of the slot come before the copy into it, across proxies too.
                plgpu.commit_smem()
                self._copy_block(ahead, jax.lax.rem(ahead - begin, config.stages))

            return self._attend(load_q, index * config.block, slot, state)

        self._write(jax.lax.fori_loop(begin, end, step, self._start()))

    def _my_blocks(self) -> tuple[jax.Array, jax.Array]:
        """First and end of the K/V blocks of this split; equal when it has none."""
        block, splits = self.config.block, self.config.splits
        first, end = self.tile.first // block, (self.tile.end + block - 1) // block
        share = (end - first + splits - 1) // splits
        begin = jnp.minimum(first + self.split * share, end)
        return begin, jnp.minimum(begin + share, end)

    def _copy_block(self, block: jax.Array, slot: jax.Array | int) -> None:
        """Starts the copies of one block of K and V, and of its scales."""
        refs, tile, token = self.refs, self.tile, block * self.config.block
        copy_pages(refs.pool, refs.page_table, tile, 0, token, refs.k_smem.at[slot], refs.k_barriers.at[slot])
        copy_pages(refs.pool, refs.page_table, tile, 1, token, refs.v_smem.at[slot], refs.v_barriers.at[slot])
        if refs.scales is not None:
            tokens = pl.ds(pl.multiple_of(token, self.config.block), self.config.block)
            plgpu.copy_gmem_to_smem(
                refs.scales.at[tile.row * self.kv_heads + tile.head, :, tokens],
                refs.scales_smem.at[slot],
                refs.k_barriers.at[slot],
            )

    def _start(self) -> _Softmax:
        config = self.config
        top = jnp.full((config.rows,), UNSEEN, jnp.float32) if self.refs.sinks is None else self._sinks()
        total = jnp.zeros((config.rows, config.block), jnp.float32)
        out = jnp.zeros((config.rows, self.dim), jnp.float32)
        return _Softmax(
            plgpu.layout_cast(top, self.acc.reduce(1)),
            plgpu.layout_cast(total, self.acc),
            plgpu.layout_cast(out, self.acc),
        )

    def _sinks(self) -> jax.Array:
        sinks = self.refs.sinks.at[self.split, self.tile.head]
        return plgpu.load(sinks, layout=self.acc.reduce(1), optimized=False)

    def _attend(
        self, load_q: Callable[[int], jax.Array], token: jax.Array, slot: jax.Array, state: _Softmax
    ) -> _Softmax:
        """Takes in the K/V block in `slot`, whose first token is `token`."""
        refs, config = self.refs, self.config
        shape = (config.rows, config.block)
        plgpu.barrier_wait(refs.k_barriers.at[slot])
        keys = self._parts(refs.k_smem.at[slot])
        scores = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.acc)
        scores = self._dot(
            scores, refs.q_smem.shape[0], load_q, len(keys), lambda part: plgpu.load(keys[part].T, layout=self.rhs)
        )
        scores = jnp.where(
            self.tile.sees(token, shape, 0, config.scoring, self.acc), self._logits(scores, slot), UNSEEN
        )
        top = jnp.maximum(state.top, self._per_row(jnp.max(scores, axis=1)))
        keep = jnp.exp2(state.top - top)
        weights = jnp.exp2(scores - across(top, shape, self.acc))
        total = state.total * across(keep, shape, self.acc) + weights
        if refs.scales is not None:
            scale = plgpu.load(refs.scales_smem.at[slot, 1], layout=self.acc.reduce(0))
            scale = jnp.where(self.tile.holds(token, (config.block,), 0, self.acc.reduce(0)), scale, 0.0)
            weights *= jax.lax.broadcast_in_dim(scale, shape, (1,))
        for index, part in enumerate(bfloat16_parts(weights, refs.p_smem.shape[0])):
            refs.p_smem[index] = part
        plgpu.barrier_wait(refs.v_barriers.at[slot])
        values = self._parts(refs.v_smem.at[slot])

        def live_values(part: int) -> jax.Array:
            stored = plgpu.load(values[part], layout=self.rhs)
            live = self.tile.holds(token, stored.shape, 0, self.rhs)
            return jnp.where(live, stored, jnp.zeros((), stored.dtype))

        out = state.out * across(keep, state.out.shape, self.acc)
        return _Softmax(
            top, total, self._dot(out, refs.p_smem.shape[0], self._lhs(refs.p_smem), len(values), live_values)
        )

    def _per_row(self, x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(x, self.acc.reduce(1))

    def _logits(self, scores: jax.Array, slot: jax.Array) -> jax.Array:
        """Scores [M, block] scaled and capped, in units of log2."""
        if self.refs.scales is not None:
            per_key = plgpu.load(self.refs.scales_smem.at[slot, 0], layout=self.acc.reduce(0))
            scores *= jax.lax.broadcast_in_dim(per_key, scores.shape, (1,))
        return self.config.scoring.logits(scores)

    def _parts(self, stored: Any) -> list[Any]:
        """K or V as bfloat16 in shared memory: as stored, or taken apart into `parts_smem`, which K and V share."""
        if stored.dtype == jnp.bfloat16:
            return [stored]
        parts = self.refs.parts_smem
        # By columns, because all of a wide block at once would not fit into registers.
        width = self.dim if self.dim % 64 else 64
        for column in range(0, self.dim, width):
            columns = pl.ds(column, width)
            piece = stored[:, columns].astype(jnp.float32)
            for index, part in enumerate(bfloat16_parts(piece, parts.shape[0])):
                parts[index, :, columns] = part
        return [parts.at[index] for index in range(parts.shape[0])]

    def _lhs(self, smem: Any) -> Callable[[int], jax.Array]:
        """Loads a part of `smem` [parts, M, N] as left operand."""
        return lambda part: plgpu.load(smem.at[part], layout=self.lhs)

    def _queries(self) -> Callable[[int], jax.Array]:
        """A part of the queries: one stays in registers, several would fill them and are loaded for each use."""
        load = self._lhs(self.refs.q_smem)
        if self.refs.q_smem.shape[0] > 1:
            return load
        only = load(0)
        return lambda _: only

    def _dot(
        self,
        acc: jax.Array,
        num_a: int,
        load_a: Callable[[int], jax.Array],
        num_b: int,
        load_b: Callable[[int], jax.Array],
    ) -> jax.Array:
        """acc + sum(a) @ sum(b), with one part of each in registers at a time.

        Products of parts whose numbers add up to more than 2, below 2**-24 of the largest, are left out.
        """
        product = _interpreted_mma if self.config.interpret else plgpu.mma
        for j in reversed(range(num_b)):
            b = load_b(j)
            for i in reversed(range(min(num_a, 3 - j))):
                acc = product(acc, load_a(i), b)
        return acc

    def _write(self, state: _Softmax) -> None:
        refs, config = self.refs, self.config
        total = self._per_row(jnp.sum(state.total, axis=1))
        if refs.sinks is not None:
            total += jnp.exp2(self._sinks() - state.top)
        factor = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        out = state.out * across(factor, state.out.shape, self.acc)
        refs.out_smem[...] = out.astype(refs.out_smem.dtype)
        if refs.lse is not None:
            refs.lse_smem[...] = jnp.where(total > 0, state.top + jnp.log(total) * LOG2E, UNSEEN)
        plgpu.commit_smem()
        kept = pl.ds(self.tile_head * config.rows_kept, config.rows_kept)
        plgpu.copy_smem_to_gmem(refs.out_smem.at[pl.ds(0, config.rows_kept)], refs.out.at[self.split, kept])
        if refs.lse is not None:
            plgpu.copy_smem_to_gmem(refs.lse_smem, refs.lse.at[self.split, self.tile_head])
        plgpu.wait_smem_to_gmem(0)


def _interpreted_mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)


def combine_splits(out: jax.Array, lse: jax.Array, rows_kept: int, dtype: Any) -> jax.Array:
    """The second pass: partial results weighted by their share of the sum of exponentials.

    Args:
      out: float32[splits, X * rows_kept, D].
      lse: float32[splits, X, M], log2.
      rows_kept: rows of each tile that are real.
      dtype: of the result.

    Returns:
      [X * rows_kept, D].
    """
    lse = lse[:, :, :rows_kept].reshape(out.shape[:2])
    weights = jnp.exp2(lse - lse.max(axis=0))
    weights = weights / weights.sum(axis=0)
    return jnp.sum(out * weights[..., None], axis=0).astype(dtype)
