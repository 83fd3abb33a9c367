"""The Mosaic TPU kernel body: attention of one item's queries over the pages of its row.

Memory: queries and outputs come and go by Pallas' own pipeline, one [K, M, E] block per grid step. Pages
and page tables stay in HBM and are copied by hand:

- K and V pages into one of two block buffers. While a block is computed the next one is on its way; after
  an item's last block that is the first block of the core's next live item, so copies never pause.
- page table rows into one of three rows of scalar memory, two items ahead, since the page ids of the next
  item must be at hand before its first block can be asked for.

`count` in scalar memory numbers a core's live items (table rows) and blocks (block buffers).

A block's softmax is folded into a running one (Milakov and Gimelshein 2018), in base 2. A block that every
query sees whole is computed without masks. In others what is not seen is replaced, never multiplied by
zero: page tails, and buffers whose pages were not copied, may hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.mosaic_tpu_plan import CORES, LANES, Form, Items

LOG2_E = float(np.log2(np.e))
MASKED = -1e30
"""Score of a key that is not seen: finite, so that a row that sees nothing of a block stays free of NaN."""
MAX_UNROLLED_HEADS = 8
MAX_UNROLLED_QUANTISED_HEADS = 4
"""Heads whose code stands side by side in decode. Of 8-bit pages 8 take as many bundles a head as 4 and spill more;
1 spills nothing and takes an eighth to a quarter more bundles."""
MAX_UNROLLED_COPIES = 8


class _Refs(NamedTuple):
    """All that a grid step works on."""

    layer: Any
    items: Items
    q: Any
    table: Any
    pool: Any
    scales: Any
    sinks: Any
    out: Any
    rows: Any
    kv: Any
    kv_scales: Any
    top: Any
    total: Any
    mixed: Any
    count: Any
    row_sems: Any
    kv_sems: Any


def scratch_shapes(form: Form, pool_dtype: Any, table_width: int) -> list[Any]:
    """Of the kernel, in the order of `_Refs` from `rows` on; no `kv_scales` without scales."""
    state = (form.kv_heads, form.rows)
    block = (2, form.pages_per_block, form.parts, form.kv_heads, form.page_size, form.width)
    return [
        pltpu.SMEM((3, 1, table_width), jnp.int32),
        pltpu.VMEM(block, pool_dtype),
        *([pltpu.VMEM((2, 2, form.kv_heads, form.block_tokens), jnp.float32)] if form.quantised else []),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, LANES), jnp.float32),
        pltpu.VMEM((*state, form.width), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((3,)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def attend_items(form: Form, *refs: Any) -> None:
    """One grid step (core, step): item `step * CORES + core`."""
    r = _name_refs(form, refs)
    core, step = pl.program_id(0), pl.program_id(1)
    item = step * CORES + core

    @pl.when(step == 0)
    def _() -> None:
        _start_core(form, r, core)

    live = r.items.end[item] > 0

    @pl.when(live)
    def _() -> None:
        _attend_item(form, r, item)

    @pl.when(jnp.logical_not(live))
    def _() -> None:
        _for_heads(form, partial(_clear, r.out.at[0]))


def _name_refs(form: Form, refs: tuple[Any, ...]) -> _Refs:
    rest = iter(refs)
    take = rest.__next__
    layer = take()
    items = Items(*(take() for _ in Items._fields))
    q, table, pool = take(), take(), take()
    scales = take() if form.quantised else None
    sinks = take() if form.has_sinks else None
    out, rows, kv = take(), take(), take()
    kv_scales = take() if form.quantised else None
    return _Refs(layer, items, q, table, pool, scales, sinks, out, rows, kv, kv_scales, *rest)


# Copies.


def _start_core(form: Form, r: _Refs, core: jax.Array) -> None:
    """Fetches the table rows of a core's first two live items and the first block of the first."""
    r.count[0] = 0
    r.count[1] = 0
    first = r.items.next_live[core]

    @pl.when(first < r.items.count)
    def _() -> None:
        second = r.items.next_live[first + CORES]
        _table_row(r, first, 0).start()

        @pl.when(second < r.items.count)
        def _() -> None:
            _table_row(r, second, 1).start()

        _table_row(r, first, 0).wait()
        _start_block(form, r, first, 0, 0, 0)


def _table_row(r: _Refs, item: jax.Array, place: Any) -> Any:
    return pltpu.make_async_copy(r.table.at[r.items.row[item]], r.rows.at[place], r.row_sems.at[place])


def _pages_of(form: Form, r: _Refs, item: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
    """First page of a block of an item, as a column of the table, and how many pages it has."""
    first = jax.lax.div(r.items.begin[item], form.page_size) + block * form.pages_per_block
    end = jax.lax.div(r.items.end[item] + (form.page_size - 1), form.page_size)
    return first, jnp.minimum(end - first, form.pages_per_block)


def _copies(form: Form, r: _Refs, page: Any, nth: Any, slot: Any) -> list[Any]:
    """The copies that bring a page to the nth place of a buffer."""
    source = (r.layer[0], page)
    copies = [pltpu.make_async_copy(r.pool.at[source], r.kv.at[slot, nth], r.kv_sems.at[slot])]
    if form.quantised:
        tokens = pl.ds(pl.multiple_of(nth * form.page_size, form.page_size), form.page_size)
        target = r.kv_scales.at[slot, :, :, tokens]
        copies.append(pltpu.make_async_copy(r.scales.at[source], target, r.kv_sems.at[slot]))
    return copies


def _start_block(form: Form, r: _Refs, item: jax.Array, block: Any, place: Any, slot: Any) -> None:
    """Asks for a block's pages; the item's table row is at `place`."""
    first, count = _pages_of(form, r, item, block)

    def start(nth: Any, _: None) -> None:
        for copy in _copies(form, r, r.rows[place, 0, first + nth], nth, slot):
            copy.start()

    @pl.when(count == form.pages_per_block)
    def _() -> None:
        unroll = math.gcd(form.pages_per_block, MAX_UNROLLED_COPIES)
        jax.lax.fori_loop(0, form.pages_per_block, start, None, unroll=unroll)

    @pl.when(count < form.pages_per_block)
    def _() -> None:
        jax.lax.fori_loop(0, count, start, None)


def _wait_block(form: Form, r: _Refs, item: jax.Array, block: Any, slot: Any) -> None:
    """Waits for what `_start_block` asked for. A wait counts bytes, so a full block is waited for at once."""
    _, count = _pages_of(form, r, item, block)

    @pl.when(count == form.pages_per_block)
    def _() -> None:
        for buffer in (r.kv, r.kv_scales) if form.quantised else (r.kv,):
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], r.kv_sems.at[slot]).wait()

    def wait(nth: Any, _: None) -> None:
        for copy in _copies(form, r, 0, nth, slot):
            copy.wait()

    @pl.when(count < form.pages_per_block)
    def _() -> None:
        jax.lax.fori_loop(0, count, wait, None)


# Attention.


def _attend_item(form: Form, r: _Refs, item: jax.Array) -> None:
    nth_item, first_block = r.count[0], r.count[1]
    following = r.items.next_live[item + CORES]
    after = r.items.next_live[following + CORES]
    place = jax.lax.rem(nth_item, 3)
    next_place = jax.lax.rem(nth_item + 1, 3)

    @pl.when((following < r.items.count) & (after < r.items.count))
    def _() -> None:
        _table_row(r, after, jax.lax.rem(nth_item + 2, 3)).start()

    _start_softmax(form, r)
    first_page, _ = _pages_of(form, r, item, 0)
    end = r.items.end[item]
    tokens = end - first_page * form.page_size
    num_blocks = jax.lax.div(tokens + (form.block_tokens - 1), form.block_tokens)

    def attend_block(block: jax.Array, _: None) -> None:
        slot = jax.lax.rem(first_block + block, 2)
        last = block + 1 == num_blocks

        @pl.when(last & (following < r.items.count))
        def _() -> None:
            _table_row(r, following, next_place).wait()

        @pl.when(jnp.logical_not(last) | (following < r.items.count))
        def _() -> None:
            next_item = jnp.where(last, following, item)
            next_block = jnp.where(last, 0, block + 1)
            _start_block(form, r, next_item, next_block, jnp.where(last, next_place, place), 1 - slot)

        _wait_block(form, r, item, block, slot)
        start = (first_page + block * form.pages_per_block) * form.page_size
        whole = _seen_whole(form, r, item, start)

        @pl.when(whole)
        def _() -> None:
            _attend_tokens(form, r, item, slot, start, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            _attend_tokens(form, r, item, slot, start, masked=True)

    jax.lax.fori_loop(0, num_blocks, attend_block, None)
    r.count[0] = nth_item + 1
    r.count[1] = first_block + num_blocks
    _finish_softmax(form, r)


def _seen_whole(form: Form, r: _Refs, item: jax.Array, start: jax.Array) -> jax.Array:
    """Whether every query of the item sees every token of the block that begins at `start`."""
    whole = start + form.block_tokens <= r.items.position[item] + 1
    if form.sliding_window is not None:
        whole &= start >= r.items.end[item] - form.sliding_window
    return whole


def _start_softmax(form: Form, r: _Refs) -> None:
    """Before any key. A sink is a key that was seen, with score `sink` and no value."""

    def start(head: Any) -> None:
        _clear(r.mixed, head)
        if form.has_sinks:
            r.top[head] = jnp.broadcast_to(r.sinks[head] * LOG2_E, r.top.shape[1:])
            r.total[head] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, r.total.shape[1:], 1) == 0, 1.0, 0.0)
        else:
            r.top[head] = jnp.full(r.top.shape[1:], MASKED, jnp.float32)
            _clear(r.total, head)

    _for_heads(form, start)


def _clear(ref: Any, head: Any) -> None:
    ref[head] = jnp.zeros(ref.shape[1:], ref.dtype)


def _finish_softmax(form: Form, r: _Refs) -> None:
    def finish(head: Any) -> None:
        total = jnp.sum(r.total[head], axis=1, keepdims=True)
        r.out[0, head] = (r.mixed[head] / total).astype(r.out.dtype)

    _for_heads(form, finish)


def _for_heads(form: Form, do: Callable[[Any], None]) -> None:
    jax.lax.fori_loop(0, form.kv_heads, lambda head, _: do(head), None, unroll=heads_side_by_side(form))


def heads_side_by_side(form: Form) -> int:
    """Heads whose code a turn of the innermost loop holds."""
    most = 1
    if form.block_queries == 1:
        most = MAX_UNROLLED_QUANTISED_HEADS if form.quantised else MAX_UNROLLED_HEADS
    return max(n for n in range(1, most + 1) if form.kv_heads % n == 0)


def _attend_tokens(form: Form, r: _Refs, item: jax.Array, slot: Any, start: jax.Array, *, masked: bool) -> None:
    """Folds the block in buffer `slot`, whose first token is `start`, into the running softmax.

    Per KV head: `top` is the largest score so far, in every lane; `total` the sum of exponentials, in parts
    that are summed over lanes at the end; `mixed` the weighted values.
    """
    seen = _seen(form, r, item, start) if masked else None

    def attend_head(head: Any) -> None:
        keys = _load(form, r, slot, 0, head)
        scores = _finish_scores(form, _dot(form, r.q[0, head], keys, contract=1), _scales(form, r, slot, 0, head))
        if masked:
            scores = jnp.where(seen, scores, MASKED)
        old = r.top[head]
        top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - _lanes(top, form.block_tokens))
        keep = jnp.exp2(old - top)
        parts = [weights[:, at : at + LANES] for at in range(0, form.block_tokens, LANES)]
        r.total[head] = keep * r.total[head] + sum(parts[1:], parts[0])
        r.top[head] = top

        values = _load(form, r, slot, form.parts - 1, head)
        value_scales = _scales(form, r, slot, 1, head)
        if masked:
            values = jnp.where(_held(form, r, item, start, values.shape, 0), values.astype(jnp.float32), 0.0)
            values = values.astype(form.dtype)
        if value_scales is not None:
            if masked:
                value_scales = jnp.where(_held(form, r, item, start, value_scales.shape, 1), value_scales, 0.0)
            weights = weights * value_scales
        added = _dot(form, weights.astype(form.dtype), values, contract=0)
        r.mixed[head] = _lanes(keep, form.width) * r.mixed[head] + added

    _for_heads(form, attend_head)


def _dot(form: Form, a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """Product of a's lanes and dimension `contract` of b, in float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if form.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _load(form: Form, r: _Refs, slot: Any, part: int, head: Any) -> jax.Array:
    """Keys or values of one head in a buffer, [tokens, E]."""
    return r.kv[slot, :, part, head].reshape(form.block_tokens, form.width).astype(form.dtype)


def _scales(form: Form, r: _Refs, slot: Any, part: int, head: Any) -> jax.Array | None:
    """Scales of one head's keys or values, [1, tokens]."""
    return r.kv_scales[slot, part, pl.ds(head, 1), :] if form.quantised else None


def _finish_scores(form: Form, scores: jax.Array, key_scales: jax.Array | None) -> jax.Array:
    """From products to scores in base 2."""
    if key_scales is not None:
        scores = scores * key_scales
    if form.logit_softcap is None:
        return scores * (form.scale * LOG2_E)
    return (form.logit_softcap * LOG2_E) * jnp.tanh(scores * (form.scale / form.logit_softcap))


def _seen(form: Form, r: _Refs, item: jax.Array, start: jax.Array) -> jax.Array:
    """bool[M, tokens]: which query sees which token."""
    shape = (form.rows, form.block_tokens)
    token = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    position = r.items.position[item]
    if form.block_queries > 1:
        # Q is a power of two.
        position += jax.lax.broadcasted_iota(jnp.int32, shape, 0) & (form.block_queries - 1)
    seen = (token <= position) & (token < r.items.end[item])
    if form.sliding_window is not None:
        seen &= token > position - form.sliding_window
    return seen


def _held(form: Form, r: _Refs, item: jax.Array, start: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Which tokens, along `axis`, any query of the item may see: the others may be anything."""
    token = start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    held = token < r.items.end[item]
    return held if form.sliding_window is None else held & (token >= r.items.begin[item])


def _lanes(x: jax.Array, size: int) -> jax.Array:
    """x [M, 128], equal in every lane, as [M, size]."""
    return x[:, :size] if size <= LANES else jnp.concatenate([x] * -(-size // LANES), axis=1)[:, :size]
