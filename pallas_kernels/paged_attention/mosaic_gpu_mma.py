"""The mma kernel: split-K flash attention of small query tiles over pages, one warpgroup a block.

It serves decode on every target that has TMA, and prefill where the WGMMA kernel does not.

A *tile* is up to `M` = 16, 32 or 64 query rows that share a KV head: the query heads of one group for one
token (decode) or for several consecutive tokens of one sequence (prefill; row `i` is token `i // G`).
Block (tile, KV head, split) reads the K/V blocks of its share of the tile's tokens through TMA into a
ring of `stages` buffers, and keeps a running maximum, sum and output in registers.
"""

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
class MmaConfig:
    """What is static in one compiled mma kernel.

    Attributes:
      rows: M, query rows a tile holds in registers: 16, 32 or 64.
      rows_kept: rows of a tile that are written; in decode the group size, else M.
      rows_per_token: query rows per token (the group size), to find a row's position; 0: one position a tile.
      block: tokens of K and V per step.
      stages: buffers in the ring.
      splits: blocks that share a tile's tokens; more than one: partial results.
      scale: of the scores.
      sliding_window, logit_softcap: as in `paged_attention`.
      interpret: runs without mma, through `jnp.dot`.
    """

    rows: int
    rows_kept: int
    rows_per_token: int
    block: int
    stages: int
    splits: int
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    interpret: bool


class Tiles(NamedTuple):
    """Query tiles and which tokens they see.

    Attributes:
      q: bfloat16[parts, X, D], all query rows in parts that add up; tile n of KV head h begins at row (n * K + h) * stride.
      stride: query rows from one tile to the next.
      bounds: int32[N, 4]: table row, first and end of the tokens that any query of the tile sees,
        position of the first query.
    """

    q: jax.Array
    stride: int
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
        _Block(config, tiles.stride, refs_).run()

    outs = plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=_scratch(config, pool, tiles.q.shape[0], out_types[0].dtype, scales is not None),
        grid=(config.splits, kv_heads, num_tiles),
        grid_names=("split", "kv_head", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if config.interpret else None,
    )(*inputs)
    return (outs[0], outs[1]) if partial else (outs[0][0], None)


def _scratch(config: MmaConfig, pool: jax.Array, q_parts: int, out_dtype: Any, scaled: bool) -> list[Any]:
    """Shared memory and barriers, in the order of `_Refs`."""
    page_size, dim = pool.shape[4:]
    pieces = max(1, config.block // page_size)
    staged = pool.dtype != jnp.bfloat16
    kv = plgpu.SMEM((config.stages, config.block, dim), pool.dtype, transforms=() if staged else _swizzled(dim))
    parts = (num_parts(pool.dtype), config.block, dim)
    p_parts = max(q_parts, 1 + scaled)  # The scales of V are folded into P and would be rounded with it.
    return [
        plgpu.SMEM((q_parts, config.rows, dim), jnp.bfloat16),
        kv,
        kv,
        plgpu.SMEM(parts, jnp.bfloat16, transforms=_swizzled(dim)) if staged else None,
        plgpu.SMEM((config.stages, 2, config.block), jnp.float32) if scaled else None,
        plgpu.SMEM((p_parts, config.rows, config.block), jnp.bfloat16, transforms=_swizzled(config.block)),
        plgpu.SMEM((config.rows, dim), out_dtype),
        plgpu.SMEM((config.rows,), jnp.float32),
        plgpu.Barrier(num_arrivals=q_parts),
        plgpu.Barrier(num_arrivals=pieces + scaled, num_barriers=config.stages),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=config.stages),
    ]


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


def _swizzled(minor: int) -> tuple[Any, ...]:
    """The shared-memory layout of bfloat16 that TMA writes and matrix loads read without bank conflicts."""
    swizzle = next(s for s in (128, 64, 32) if 2 * minor % s == 0)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


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

    def __init__(self, config: MmaConfig, stride: int, refs: _Refs) -> None:
        self.config, self.refs = config, refs
        self.split, self.head, self.tile = (jax.lax.axis_index(name) for name in ("split", "kv_head", "tile"))
        self.kv_heads, self.page_size, self.dim = refs.pool.shape[3:]
        self.tile_head = self.tile * self.kv_heads + self.head
        self.q_start = self.tile_head * stride
        m_warps = config.rows // 16
        self.lhs = plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=m_warps)
        self.rhs = plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=m_warps)
        self.acc = plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=m_warps)
        self.layer = refs.layer[0]
        self.row, self.first, self.end, self.position = (refs.bounds[self.tile, i] for i in range(4))
        self.last_page = jnp.maximum(self.end - 1, 0) // self.page_size

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
        q = self._lhs_parts(refs.q_smem)

        def step(index: jax.Array, state: _Softmax) -> _Softmax:
            slot = jax.lax.rem(index - begin, config.stages)
            ahead = index + config.stages - 1

            @pl.when(ahead < end)
            def _() -> None:
                # The last step's reads of the slot come before the copy into it, across proxies too.
                plgpu.commit_smem()
                self._copy_block(ahead, jax.lax.rem(ahead - begin, config.stages))

            return self._attend(q, index * config.block, slot, state)

        self._write(jax.lax.fori_loop(begin, end, step, self._start()))

    def _my_blocks(self) -> tuple[jax.Array, jax.Array]:
        """First and end of the K/V blocks of this split; equal when it has none."""
        block, splits = self.config.block, self.config.splits
        first, end = self.first // block, (self.end + block - 1) // block
        share = (end - first + splits - 1) // splits
        begin = jnp.minimum(first + self.split * share, end)
        return begin, jnp.minimum(begin + share, end)

    def _copy_block(self, block: jax.Array, slot: jax.Array | int) -> None:
        """Starts the copies of one block of K and V; pages beyond the last are the last again."""
        refs, config = self.refs, self.config
        piece = min(self.page_size, config.block)
        for part in range(config.block // piece):
            token = block * config.block + part * piece
            page = refs.page_table[self.row, jnp.minimum(token // self.page_size, self.last_page)]
            inside = pl.ds(pl.multiple_of(jax.lax.rem(token, self.page_size), piece), piece)
            for kind, smem, barriers in ((0, refs.k_smem, refs.k_barriers), (1, refs.v_smem, refs.v_barriers)):
                plgpu.copy_gmem_to_smem(
                    refs.pool.at[self.layer, page, kind, self.head, inside],
                    smem.at[slot, pl.ds(part * piece, piece)],
                    barriers.at[slot],
                )
        if refs.scales is not None:
            tokens = pl.ds(pl.multiple_of(block * config.block, config.block), config.block)
            plgpu.copy_gmem_to_smem(
                refs.scales.at[self.row * self.kv_heads + self.head, :, tokens],
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
        sinks = self.refs.sinks.at[self.split, self.head]
        return plgpu.load(sinks, layout=self.acc.reduce(1), optimized=False)

    def _attend(self, q: list[jax.Array], token: jax.Array, slot: jax.Array, state: _Softmax) -> _Softmax:
        """Takes in the K/V block in `slot`, whose first token is `token`."""
        refs, config = self.refs, self.config
        shape = (config.rows, config.block)
        plgpu.barrier_wait(refs.k_barriers.at[slot])
        keys = [plgpu.load(part.T, layout=self.rhs) for part in self._parts(refs.k_smem.at[slot])]
        scores = self._dot(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.acc), q, keys)
        scores = jnp.where(self._seen(token, shape), self._logits(scores, slot), UNSEEN)
        top = jnp.maximum(state.top, self._per_row(jnp.max(scores, axis=1)))
        keep = jnp.exp2(state.top - top)
        weights = jnp.exp2(scores - self._across(top, shape))
        total = state.total * self._across(keep, shape) + weights
        if refs.scales is not None:
            scale = plgpu.load(refs.scales_smem.at[slot, 1], layout=self.acc.reduce(0))
            scale = jnp.where(self._live(token, (config.block,), 0, self.acc.reduce(0)), scale, 0.0)
            weights *= jax.lax.broadcast_in_dim(scale, shape, (1,))
        for index, part in enumerate(bfloat16_parts(weights, refs.p_smem.shape[0])):
            refs.p_smem[index] = part
        plgpu.barrier_wait(refs.v_barriers.at[slot])
        values = [plgpu.load(part, layout=self.rhs) for part in self._parts(refs.v_smem.at[slot])]
        live = self._live(token, values[0].shape, 0, self.rhs)
        values = [jnp.where(live, part, jnp.zeros((), part.dtype)) for part in values]
        out = state.out * self._across(keep, state.out.shape)
        return _Softmax(top, total, self._dot(out, self._lhs_parts(refs.p_smem), values))

    def _per_row(self, x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(x, self.acc.reduce(1))

    def _across(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """[M] over the columns of `shape`."""
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (0,)), self.acc)

    def _logits(self, scores: jax.Array, slot: jax.Array) -> jax.Array:
        """Scores [M, block] scaled and capped, in units of log2."""
        config, scale = self.config, self.config.scale
        if self.refs.scales is not None:
            per_key = plgpu.load(self.refs.scales_smem.at[slot, 0], layout=self.acc.reduce(0))
            scores *= jax.lax.broadcast_in_dim(per_key, scores.shape, (1,))
        if config.logit_softcap is None:
            return scores * (scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2x)); the hardware's tanh is good to 2**-11 only.
        cap = config.logit_softcap
        return (cap * LOG2E) * (1.0 - 2.0 / (1.0 + jnp.exp2(scores * (2.0 * LOG2E * scale / cap))))

    def _live(self, token: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        """Which keys any query of the tile sees; all others may hold anything."""
        key = token + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        return (key >= self.first) & (key < self.end)

    def _seen(self, token: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """Which keys each query row sees."""
        seen = self._live(token, shape, 1, self.acc)
        if self.config.rows_per_token:
            key = token + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.acc)
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.acc)
            position = self.position + row // self.config.rows_per_token
            seen &= key <= position
            if self.config.sliding_window is not None:
                seen &= key > position - self.config.sliding_window
        return seen

    def _parts(self, stored: Any) -> list[Any]:
        """K or V as bfloat16 in shared memory: as stored, or taken apart into `parts_smem`, which K and V share."""
        if stored.dtype == jnp.bfloat16:
            return [stored]
        parts = self.refs.parts_smem
        numbers = stored[...].astype(jnp.float32)
        for index, part in enumerate(bfloat16_parts(numbers, parts.shape[0])):
            parts[index] = part
        return [parts.at[index] for index in range(parts.shape[0])]

    def _lhs_parts(self, smem: Any) -> list[jax.Array]:
        return [plgpu.load(smem.at[index], layout=self.lhs) for index in range(smem.shape[0])]

    def _dot(self, acc: jax.Array, a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
        """acc + sum(a) @ sum(b), smallest products first; those below 2**-24 of the largest are left out."""
        product = _interpreted_mma if self.config.interpret else plgpu.mma
        pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j <= 2]
        for i, j in sorted(pairs, key=sum, reverse=True):
            acc = product(acc, a[i], b[j])
        return acc

    def _write(self, state: _Softmax) -> None:
        refs, config = self.refs, self.config
        total = self._per_row(jnp.sum(state.total, axis=1))
        if refs.sinks is not None:
            total += jnp.exp2(self._sinks() - state.top)
        factor = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        out = state.out * self._across(factor, state.out.shape)
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
