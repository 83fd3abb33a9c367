"""The WGMMA kernel: prefill of bfloat16 on Hopper, two warpgroups that compute and one that copies.

A tile is 128 query rows that share a KV head: `128 // G` consecutive tokens of one sequence by the G query
heads of the group, so K and V are read once per KV head. Each compute warpgroup has 64 of the rows; both go
over the same K/V blocks, which the third warpgroup brings through TMA into a ring of `stages` buffers.

Interior blocks, which every query of the tile sees whole, take a loop without masks. Blocks that hold tokens
no query sees (page tails, and what lies before the window) have those V rows zeroed in shared memory first:
their weight is 0, but 0 * NaN is NaN.
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
    UNSEEN,
    Scoring,
    Tile,
    across,
    copy_pages,
    interpreter,
    num_copies,
    swizzled,
)

WARPGROUP_ROWS = 64
COMPUTE_WARPGROUPS = 2
TILE_ROWS = WARPGROUP_ROWS * COMPUTE_WARPGROUPS
_LAYOUT = plgpu.Layout.WGMMA


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """What is static in one compiled WGMMA kernel.

    Attributes:
      block: tokens of K and V per step, a multiple of 64.
      stages: buffers in the ring.
      scoring: how scores are made.
      interpret: runs in the interpreter; P V, whose left operand is in registers, through `jnp.dot`.
    """

    block: int
    stages: int
    scoring: Scoring
    interpret: bool


def wgmma_attention(
    q: jax.Array,
    bounds: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    config: WgmmaConfig,
) -> jax.Array:
    """Runs the kernel.

    Args:
      q: bfloat16[N, K, 128, D], query tiles.
      bounds: int32[N, 4]: table row, first and end of the tokens that any query of the tile sees, position
        of the first query.
      pool: bfloat16[L, P, 2, K, S, D].
      layer: int32[1].
      page_table: int32[R, W].
      sinks: float32[K, 128], one per query row in units of log2, or None.
      config: see `WgmmaConfig`.

    Returns:
      bfloat16[N, K, 128, D]; rows that are no query's hold anything finite.
    """
    num_tiles, kv_heads, _, dim = q.shape
    page_size = pool.shape[4]
    inputs = [q, bounds, pool, layer, page_table, *([] if sinks is None else [sinks])]

    def body(*refs: Any) -> None:
        operands = list(refs[: len(inputs)]) + [None] * (6 - len(inputs))
        _Block(config, _Refs(*operands, *refs[len(inputs) :])).run()

    kv = plgpu.SMEM((config.stages, config.block, dim), jnp.bfloat16, transforms=swizzled(dim))
    arrived = plgpu.Barrier(num_arrivals=num_copies(page_size, config.block), num_barriers=config.stages)
    consumed = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            plgpu.SMEM((COMPUTE_WARPGROUPS, WARPGROUP_ROWS, dim), jnp.bfloat16, transforms=swizzled(dim)),
            kv,
            kv,
            plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
            arrived,
            arrived,
            consumed,
            consumed,
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        ],
        grid=(kv_heads, num_tiles),
        grid_names=("kv_head", "tile"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(config.interpret),
    )(*inputs)


class _Refs(NamedTuple):
    """Operands, result and scratch of the kernel body."""

    q: Any
    bounds: Any
    pool: Any
    layer: Any
    page_table: Any
    sinks: Any
    out: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_barriers: Any
    k_barriers: Any
    v_barriers: Any
    k_consumed: Any
    v_consumed: Any
    cleaned: Any


class _Softmax(NamedTuple):
    """Running softmax of 64 rows, in units of log2: maxima [64], sums [64], outputs [64, D]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


class _Block:
    """The body of one block: methods run while the kernel is traced."""

    def __init__(self, config: WgmmaConfig, refs: _Refs) -> None:
        self.config, self.refs = config, refs
        self.number, self.head = jax.lax.axis_index("tile"), jax.lax.axis_index("kv_head")
        self.warpgroup = jax.lax.axis_index("warpgroup")
        self.dim = refs.q.shape[3]
        self.tile = Tile.read(refs.layer, refs.bounds, self.number, self.head)
        self.begin = self.tile.first // config.block
        self.end = (self.tile.end + config.block - 1) // config.block

    def run(self) -> None:
        """Splits the warpgroups by their work."""

        @pl.when(self.warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            self._compute()

        @pl.when(self.warpgroup == COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self._copy()

    def _copy(self) -> None:
        """Brings every K/V block, each as soon as its slot is free."""
        refs, config = self.refs, self.config

        def step(index: jax.Array, _: None) -> None:
            turn = index - self.begin
            slot = jax.lax.rem(turn, config.stages)
            for kind, smem, arrived, consumed in (
                (0, refs.k_smem, refs.k_barriers, refs.k_consumed),
                (1, refs.v_smem, refs.v_barriers, refs.v_consumed),
            ):
                pl.when(turn >= config.stages)(lambda consumed=consumed: plgpu.barrier_wait(consumed.at[slot]))
                token = index * config.block
                copy_pages(refs.pool, refs.page_table, self.tile, kind, token, smem.at[slot], arrived.at[slot])

        jax.lax.fori_loop(self.begin, self.end, step, None)

    def _compute(self) -> None:
        """One compute warpgroup: its 64 query rows against every block."""
        refs = self.refs
        rows = pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        q_smem = refs.q_smem.at[self.warpgroup]
        plgpu.copy_gmem_to_smem(refs.q.at[self.number, self.head, rows], q_smem, refs.q_barriers.at[self.warpgroup])
        plgpu.barrier_wait(refs.q_barriers.at[self.warpgroup])
        state = self._start(rows)
        interior, tail = self._interior()
        for begin, end, masked in ((self.begin, interior, True), (interior, tail, False), (tail, self.end, True)):
            state = jax.lax.fori_loop(begin, end, lambda i, s, masked=masked: self._attend(i, s, masked), state)
        total = state.total
        if refs.sinks is not None:
            total += jnp.exp2(self._sinks(rows) - state.top)
        out = state.out * across(jnp.where(total > 0, 1.0 / total, 0.0), state.out.shape, _LAYOUT)
        q_smem[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, refs.out.at[self.number, self.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _interior(self) -> tuple[jax.Array, jax.Array]:
        """First and end of the blocks that every query of the tile sees whole."""
        block, scoring = self.config.block, self.config.scoring
        begin = self.begin
        if scoring.sliding_window is not None:
            # The last query's window begins last.
            begin = (jnp.maximum(self.tile.end - scoring.sliding_window, 0) + block - 1) // block
        begin = jnp.clip(begin, self.begin, self.end)
        return begin, jnp.clip((self.tile.position + 1) // block, begin, self.end)

    def _start(self, rows: Any) -> _Softmax:
        top = jnp.full((WARPGROUP_ROWS,), UNSEEN, jnp.float32) if self.refs.sinks is None else self._sinks(rows)
        return _Softmax(
            plgpu.layout_cast(top, _LAYOUT.reduce(1)),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _LAYOUT.reduce(1)),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, self.dim), jnp.float32), _LAYOUT),
        )

    def _sinks(self, rows: Any) -> jax.Array:
        return plgpu.load(self.refs.sinks.at[self.head, rows], layout=_LAYOUT.reduce(1), optimized=False)

    def _attend(self, index: jax.Array, state: _Softmax, masked: bool) -> _Softmax:
        """Takes in K/V block `index`."""
        refs, config = self.refs, self.config
        token = index * config.block
        slot = jax.lax.rem(index - self.begin, config.stages)
        shape = (WARPGROUP_ROWS, config.block)

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, refs.q_smem.at[self.warpgroup], refs.k_smem.at[slot].T)
            return acc[...]

        plgpu.barrier_wait(refs.k_barriers.at[slot])
        scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(refs.k_consumed.at[slot])
        scores = config.scoring.logits(scores)
        if masked:
            first_row = self.warpgroup * WARPGROUP_ROWS
            scores = jnp.where(self.tile.sees(token, shape, first_row, config.scoring, _LAYOUT), scores, UNSEEN)
        top = jnp.maximum(state.top, jnp.max(scores, axis=1))
        keep = jnp.exp2(state.top - top)
        weights = jnp.exp2(scores - across(top, shape, _LAYOUT))
        total = state.total * keep + jnp.sum(weights, axis=1)
        out = state.out * across(keep, state.out.shape, _LAYOUT)
        plgpu.barrier_wait(refs.v_barriers.at[slot])
        if masked:
            self._clean_values(token, slot)
        out = self._weighted_values(out, weights.astype(jnp.bfloat16), refs.v_smem.at[slot])
        plgpu.barrier_arrive(refs.v_consumed.at[slot])
        return _Softmax(top, total, out)

    def _clean_values(self, token: jax.Array, slot: jax.Array) -> None:
        """Zeroes the V rows in `slot` that no query sees, the warpgroups by turns, and waits for both."""
        refs, block = self.refs, self.config.block

        def clean(part: int) -> Callable[[], None]:
            def run() -> None:
                values = refs.v_smem.at[slot, pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                stored = plgpu.load(values, layout=_LAYOUT)
                live = self.tile.holds(token + part * WARPGROUP_ROWS, stored.shape, 0, _LAYOUT)
                values[...] = jnp.where(live, stored, jnp.zeros((), stored.dtype))

            return run

        @pl.when((token < self.tile.first) | (token + block > self.tile.end))
        def _() -> None:
            for part in range(block // WARPGROUP_ROWS):
                pl.when(self.warpgroup == part % COMPUTE_WARPGROUPS)(clean(part))
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.cleaned)
            plgpu.barrier_wait(refs.cleaned)

    def _weighted_values(self, out: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        """out + weights @ values."""
        if self.config.interpret:
            return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

        def product(acc: Any) -> None:
            plgpu.wgmma(acc, weights, values)

        return pl.run_state(product)(plgpu.ACC.init(out))
