"""KV write for TPU: reads the rows around new tokens, replaces theirs, and writes them back, many at a time.

A row of 16-bit numbers shares its place in a tile with its neighbours, so it cannot be written alone. XLA's scatter
reads and writes 16 vectors at a time and waits in between; here a group of `GROUP_ROWS` rows of all heads, K and V, is
one copy each way, and `BUFFERS` of them are under way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

DTYPES = ("bfloat16", "float32")
GROUP_ROWS = 16
"""Rows of a page that are copied at a time: a tile of bfloat16, two of float32."""
BUFFERS = 8
AHEAD = BUFFERS // 2
"""Groups whose rows are asked for before their turn; the other half is being written back."""


class _Groups(NamedTuple):
    """int32[N] each: aligned rows of a page that new tokens lie in.

    Attributes:
      page: 0 never occurs below `count`.
      row: of the page, the group's first; a multiple of GROUP_ROWS.
      begin, end: which of the group's rows are new.
      first: the token that the group's row `begin` is.
      count: int32[1], groups in use.
    """

    page: jax.Array
    row: jax.Array
    begin: jax.Array
    end: jax.Array
    first: jax.Array
    count: jax.Array


def write_kv_mosaic_tpu(
    pool: jax.Array,
    layer: jax.Array,
    new: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    starts: jax.Array | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The pool with the tokens' rows replaced; those of page 0 are left out.

    Args:
      pool: [L, P, parts, K, S, E], bfloat16 or float32, E a multiple of 128, S of 16.
      new: [T, parts, K, E] in the pool's dtype.
      page_ids, offsets: int32[T].
      starts: int32[R + 1]: tokens starts[r] to starts[r + 1] follow each other in a sequence, and no two rows share
        a page that they write to. None: no two tokens do.
      interpret: as in `paged_attention_mosaic_tpu`.

    Raises:
      NotImplementedError: any other pool.
    """
    if pool.shape[5] % 128 or pool.shape[4] % GROUP_ROWS or pool.dtype.name not in DTYPES:
        raise NotImplementedError(
            f"the pool is {pool.dtype.name}{list(pool.shape)}; mosaic_tpu has {' and '.join(DTYPES)}, pages of a"
            f" multiple of {GROUP_ROWS} tokens and a last dimension that is a multiple of 128"
        )
    if starts is None:
        groups = _groups_of_tokens(page_ids, offsets)
        blocks = new[groups.first][:, :, :, None]
    else:
        groups = _groups_of_runs(page_ids, offsets, starts)
        row = jnp.arange(GROUP_ROWS, dtype=jnp.int32)
        token = jnp.clip(groups.first[:, None] + row - groups.begin[:, None], 0, new.shape[0] - 1)
        blocks = new[token].transpose(0, 2, 3, 1, 4)
    return _call(pool, layer, blocks, groups, interpret)


def _groups_of_tokens(page_ids: jax.Array, offsets: jax.Array) -> _Groups:
    """A group for every token that is no padding; those in use come first."""
    (first,) = jnp.nonzero(page_ids != 0, size=page_ids.shape[0], fill_value=0)
    at = offsets[first]
    begin = at % GROUP_ROWS
    count = jnp.sum(page_ids != 0, dtype=jnp.int32)[None]
    return _Groups(page_ids[first], at - begin, begin, begin + 1, first.astype(jnp.int32), count)


def _groups_of_runs(page_ids: jax.Array, offsets: jax.Array, starts: jax.Array) -> _Groups:
    """A group for every aligned piece of a row's tokens."""
    tokens, rows = page_ids.shape[0], starts.shape[0] - 1
    index = jnp.arange(tokens, dtype=jnp.int32)
    opens = (offsets % GROUP_ROWS == 0) | jnp.zeros(tokens + 1, jnp.bool_).at[starts].set(True)[:tokens]
    opens &= index < starts[-1]
    # A row of n tokens touches at most n // 16 + 2 groups.
    size = min(tokens, tokens // GROUP_ROWS + 2 * rows)
    (first,) = jnp.nonzero(opens, size=size + 1, fill_value=tokens)
    first = first.astype(jnp.int32)
    length = jnp.minimum(first[1:], starts[-1]) - first[:-1]
    first = jnp.minimum(first[:-1], tokens - 1)
    at = offsets[first]
    begin = at % GROUP_ROWS
    return _Groups(page_ids[first], at - begin, begin, begin + length, first, jnp.sum(opens, dtype=jnp.int32)[None])


def _call(
    pool: jax.Array, layer: jax.Array, blocks: jax.Array, groups: _Groups, interpret: bool | pltpu.InterpretParams
) -> jax.Array:
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), *groups)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    _, _, parts, heads, _, width = pool.shape
    return pl.pallas_call(
        _write_groups,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, parts, heads, GROUP_ROWS, width), pool.dtype),
                pltpu.VMEM((BUFFERS, *blocks.shape[1:]), blocks.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret is True else interpret,
        name="write_kv",
    )(*scalars, blocks, pool)


def _write_groups(layer: Any, *refs: Any) -> None:
    groups = _Groups(*refs[: len(_Groups._fields)])
    blocks, _, pool, rows, new, read_sems, write_sems = refs[len(_Groups._fields) :]
    count = groups.count[0]

    def place(nth: Any) -> Any:
        row = pl.multiple_of(groups.row[nth], GROUP_ROWS)
        return pool.at[layer[0], groups.page[nth], :, :, pl.ds(row, GROUP_ROWS)]

    def reads(nth: Any) -> tuple[Any, Any]:
        slot = jax.lax.rem(nth, BUFFERS)
        return (
            pltpu.make_async_copy(place(nth), rows.at[slot], read_sems.at[slot]),
            pltpu.make_async_copy(blocks.at[nth], new.at[slot], read_sems.at[slot]),
        )

    def write(nth: Any) -> Any:
        slot = jax.lax.rem(nth, BUFFERS)
        return pltpu.make_async_copy(rows.at[slot], place(nth), write_sems.at[slot])

    def start_reads(nth: Any, _: None) -> None:
        for copy in reads(nth):
            copy.start()

    def replace(nth: Any, _: None) -> None:
        for copy in reads(nth):
            copy.wait()
        _replace_rows(rows, new, jax.lax.rem(nth, BUFFERS), groups.begin[nth], groups.end[nth])
        write(nth).start()
        following = nth + AHEAD

        @pl.when(following < count)
        def _() -> None:
            @pl.when(following >= BUFFERS)
            def _() -> None:
                write(following - BUFFERS).wait()

            start_reads(following, None)

    jax.lax.fori_loop(0, jnp.minimum(count, AHEAD), start_reads, None)
    jax.lax.fori_loop(0, count, replace, None)
    jax.lax.fori_loop(jnp.maximum(count - BUFFERS, 0), count, lambda nth, _: write(nth).wait(), None)


def _replace_rows(rows: Any, new: Any, slot: Any, begin: Any, end: Any) -> None:
    """Rows [begin, end) of every head in a buffer become those of `new`, which has as many rows or one for all."""
    _, parts, heads, _, width = rows.shape
    row = jax.lax.broadcasted_iota(jnp.int32, (GROUP_ROWS, width), 0)
    is_new = (row >= begin) & (row < end)

    def replace(index: Any, _: None) -> None:
        part, head = jax.lax.div(index, heads), jax.lax.rem(index, heads)
        value = jnp.broadcast_to(new[slot, part, head].astype(jnp.float32), (GROUP_ROWS, width))
        old = rows[slot, part, head].astype(jnp.float32)
        rows[slot, part, head] = jnp.where(is_new, value, old).astype(rows.dtype)

    jax.lax.fori_loop(0, parts * heads, replace, None, unroll=True)
