"""The step functions: one iteration on the device, in two programs.

The first computes logits, the second samples from them. What the second needs and the first does not, the masks of
grammars, the host works out while the first runs.

One function serves decode, prefill and both at once; which parts exist follows from the bucket. All
tokens of an iteration, decode rows first, go through the layers as one flat batch, so weights are read
once. Attention alone is split: decode rows against their page tables, prefill tokens against theirs.

The pool and the slot state are donated and updated in place; page 0 and the scratch slot take every
padding write, so no row needs a branch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.core import MAX_LOGPROBS
from jaxserve.models import (
    Attend,
    AttentionOptions,
    Batch,
    LoraTokens,
    ModelConfig,
    RunLayers,
    axis_size,
    forward,
    model_axes,
    unembed,
)
from jaxserve.runtime.kv_pool import KVPool, PoolLayout
from jaxserve.runtime.sampler import TokenScores, sample, score, wants_logprobs
from jaxserve.runtime.slot_state import EditState, SampledState, SlotState, join_state, split_state
from jaxserve.runtime.weights_form import STACK_ACTIVATIONS
from jaxserve.tables import Bucket
from jaxserve.tables.layout import FLAG_EDITS, FLAG_LIVE, FLAG_PROMPT_LOGPROBS, TableLayout, sample_fields
from pallas_kernels.decoder_stack import StackTables, decoder_stack, is_stack
from pallas_kernels.kv_write import choose_write, write_kv
from pallas_kernels.paged_attention import paged_attention

PROMPT_SCORE_ROWS = 32
"""Prompt positions whose logits are held at once while prompt log-probabilities are computed."""


class Forwarded(NamedTuple):
    """What the first program of a step hands to the second, and prompt scores.

    Attributes:
      logits: float32[N, V] of decode rows, then prefill rows.
      sample_ints: int32[fields, N], see `TableLayout.sample_ints`.
      prompt_scores: of the tokens that follow each prompt position, T rows; None where T is 0.
    """

    logits: jax.Array
    sample_ints: jax.Array
    prompt_scores: TokenScores | None


class StepOutputs(NamedTuple):
    """What leaves the device.

    Attributes:
      tokens: int32[N], sampled ids of decode rows, then prefill rows, `NOT_A_NUMBER` of broken logits; of a decode loop
        int32[max steps, B].
      scores: of the sampled tokens, N rows; None of a decode loop, like the next.
      prompt_scores: of the tokens that follow each prompt position, T rows.
    """

    tokens: jax.Array
    scores: TokenScores | None
    prompt_scores: TokenScores | None


def make_step(kv: PoolLayout, layout: TableLayout) -> Any:
    """The function that computes the logits of one bucket.

    Args:
      kv: model, devices and KV pool.
      layout: field places of the bucket.

    Returns:
      `step(params, pool, last_token, ints) -> (pool, Forwarded)`, to be jitted with `pool` donated.
    """
    config, rows = kv.config, layout.bucket.decode_rows

    def step(params: Any, pool: KVPool, last_token: jax.Array, ints: jax.Array) -> tuple[KVPool, Forwarded]:
        fields = layout.unpack_ints(ints)
        hidden, pool = hidden_states(kv, layout.bucket, params, pool, last_token, fields)
        logits = unembed(config, params, hidden[_sampled_positions(fields, rows)])
        chunks = layout.bucket.prefill_tokens
        prompt_scores = _score_prompt(config, params, hidden[rows:], fields, rows) if chunks else None
        return pool, Forwarded(logits, layout.sample_ints(ints), prompt_scores)

    return step


def make_prompt_logits(kv: PoolLayout, layout: TableLayout) -> Any:
    """The function that computes the logits of every prompt token of a bucket.

    Returns:
      `run(params, pool, last_token, ints) -> (pool, float32[T, V])`, to be jitted with `pool` donated.
    """

    def run(params: Any, pool: KVPool, last_token: jax.Array, ints: jax.Array) -> tuple[KVPool, jax.Array]:
        fields = layout.unpack_ints(ints)
        hidden, pool = hidden_states(kv, layout.bucket, params, pool, last_token, fields)
        return pool, unembed(kv.config, params, hidden[layout.bucket.decode_rows :])

    return run


def hidden_states(
    kv: PoolLayout, bucket: Bucket, params: Any, pool: KVPool, last_token: jax.Array, fields: dict[str, Any]
) -> tuple[jax.Array, KVPool]:
    """Runs the tokens of a step through all layers; their K and V are written.

    Args:
      fields: of the int32 blob.

    Returns:
      ([B + T, d], pool): hidden states of decode rows, then prefill tokens.
    """
    token_ids = jnp.concatenate([last_token[fields["decode_slot"]], fields["prefill_tokens"]])
    positions = jnp.concatenate([jnp.maximum(fields["decode_position"], 0), fields["prefill_position"]])
    page_ids, offsets = _write_places(fields, positions, bucket.decode_rows, kv.page_size)
    attend = _make_attend(kv, bucket, fields, page_ids, offsets)
    in_one_call = is_stack(params["layers"])
    run_layers = _make_run_layers(kv, fields, page_ids, offsets) if in_one_call else None
    lora, batch = _lora_tokens(kv, bucket, fields), Batch(_live(fields), kv.mesh)
    return forward(kv.config, params, token_ids, positions, attend, pool, run_layers, lora, batch)


def _lora_tokens(kv: PoolLayout, bucket: Bucket, fields: dict[str, Any]) -> LoraTokens | None:
    """The adapter of every token's row; None: tables without adapters."""
    places = fields.get("adapter")
    if places is None:
        return None
    decode, prefill = places[: bucket.decode_rows], places[bucket.decode_rows :]
    if bucket.prefill_tokens:
        decode = jnp.concatenate([decode, prefill[fields["prefill_row"]]])
    return LoraTokens(decode, kv.mesh.size == 1 and kv.mesh.devices.flat[0].platform == "cpu")


def sample_step(
    sampled: SampledState,
    edits: EditState,
    logits: jax.Array,
    sample_ints: jax.Array,
    floats: jax.Array,
    masks: jax.Array,
) -> tuple[SampledState, jax.Array, TokenScores]:
    """Samples the rows of a step and remembers their tokens. Jitted with `sampled` donated, once per number of rows.

    Args:
      sampled, edits: the slot state.
      logits, sample_ints: see `Forwarded`.
      floats: the float32 blob of the tables.
      masks: uint32[N, ceil(V / 32)], see `sample`.

    Returns:
      What changed of the state, int32[N] sampled ids, and their scores.
    """
    state = join_state(sampled, edits)
    fields = sample_fields(sample_ints, floats)
    tokens = sample(logits, state, fields, masks)
    scores = score(logits, tokens, wants_logprobs(fields))
    return split_state(remember(state, tokens, fields))[0], tokens, scores


def _make_attend(
    kv: PoolLayout, bucket: Bucket, fields: dict[str, Any], page_ids: jax.Array, offsets: jax.Array
) -> Attend:
    """What a layer does with its K and V: keep them in their pages, and attend over the pages.

    A layer's K and V lie at its place in the pool, in pages of its group's table.

    The mesh's "model" axis takes KV heads apart here, not in the compiler: it would gather the pool.
    Where the heads do not divide, every device holds and attends to all of them; but one KV head that every device
    holds, or that those along the axis "copies" hold, has its query heads taken apart.
    """
    rows = bucket.decode_rows
    kv_heads = PartitionSpec(None, kv.spec[3])
    split = model_axes(kv.mesh)
    query_axis = None if kv.spec[3] is None else split
    if kv.config.num_kv_heads == 1 and kv.config.num_heads % axis_size(kv.mesh, split) == 0:
        query_axis = split
    heads = PartitionSpec(None, query_axis)
    of_groups = {"decode_pages": fields["decode_pages"], "prefill_pages": fields["prefill_pages"], "page_ids": page_ids}

    def attend(
        layer: Any, q: jax.Array, k: jax.Array, v: jax.Array | None, cache: KVPool, options: AttentionOptions
    ) -> tuple[jax.Array, KVPool]:
        def local(
            layer: jax.Array,
            q: jax.Array,
            k: jax.Array,
            v: jax.Array | None,
            cache: KVPool,
            tables: dict[str, Any],
            sinks: jax.Array | None,
        ) -> tuple[jax.Array, KVPool]:
            cache = _write(cache, layer, k, v, tables, rows, kv)
            own = options._replace(sinks=sinks)
            over_pages = partial(
                paged_attention, scales=cache.scales, implementation=kv.implementation, **own._asdict()
            )
            outputs = []
            if rows:
                contexts = tables["decode_position"] + 1
                outputs.append(over_pages(q[:rows], cache.pages, layer, tables["decode_pages"], contexts))
            if bucket.prefill_tokens:
                chunks = (tables["prefill_pages"], tables["prefill_context"], tables["prefill_starts"])
                outputs.append(over_pages(q[rows:], cache.pages, layer, *chunks))
            return jnp.concatenate(outputs), cache

        everywhere, by_head = PartitionSpec(), PartitionSpec(query_axis)
        group, place = _place_of(kv, layer)
        own = {name: jax.lax.dynamic_index_in_dim(table, group, keepdims=False) for name, table in of_groups.items()}
        tables = fields | own | {"offsets": offsets}
        return jax.shard_map(
            local,
            mesh=kv.mesh,
            in_specs=(everywhere, heads, kv_heads, kv_heads, kv.spec, everywhere, by_head),
            out_specs=(heads, kv.spec),
            check_vma=False,
        )(place, q, k, v, cache, tables, options.sinks)

    return attend


def _place_of(kv: PoolLayout, layer: Any) -> tuple[Any, jax.Array]:
    """Group of a layer, and its place in the pool."""
    index, places = jnp.asarray(layer, jnp.int32), kv.groups.places
    if len(kv.groups.windows) == 1:
        return 0, index
    group, place = jax.lax.dynamic_index_in_dim(jnp.asarray(places, jnp.int32), index, keepdims=False)
    return group, place


def _make_run_layers(kv: PoolLayout, fields: dict[str, Any], page_ids: jax.Array, offsets: jax.Array) -> RunLayers:
    """All layers in one call, on one CPU device."""
    config = kv.config
    own = {name: fields[name] for name in StackTables._fields if name in fields}
    if not fields["prefill_context"].shape[0]:
        own["prefill_starts"] = jnp.zeros(1, jnp.int32)
    tables = StackTables(page_ids=page_ids, offsets=offsets, **own)

    def run_layers(
        layers: Any, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: KVPool
    ) -> tuple[jax.Array, KVPool]:
        x, pages = decoder_stack(
            x,
            layers,
            cache.pages,
            rope,
            tables,
            sliding_windows=config.sliding_windows,
            rms_norm_eps=config.rms_norm_eps,
            activation=STACK_ACTIVATIONS[config.hidden_act],
            places=kv.groups.places,
        )
        return x, KVPool(pages, None)

    return run_layers


def _write(
    cache: KVPool,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    tables: dict[str, Any],
    rows: int,
    kv: PoolLayout,
) -> KVPool:
    """The pool with every token's K and V. A kernel is told which tokens follow each other: one call for each kind."""
    pages, places = cache.pages, (tables["page_ids"], tables["offsets"])
    implementation = choose_write(pages, kv.implementation)
    options = {"value_dim": kv.config.value_dim, "implementation": implementation}
    if cache.scales is not None:
        return KVPool(*write_kv(pages, layer, k, v, *places, cache.scales, **options))
    kinds = [(slice(None), None)]
    if implementation != "xla":
        kinds = [(slice(rows), None), (slice(rows, None), tables["prefill_starts"])]
    for part, starts in kinds:
        if k[part].shape[0]:
            new = (k[part], None if v is None else v[part], *(place[part] for place in places))
            pages = write_kv(pages, layer, *new, starts=starts, **options)
    return KVPool(pages, None)


def _write_places(
    fields: dict[str, Any], positions: jax.Array, rows: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page id in each group of layers ([G, B + T]) and offset that each token's K and V go to; page 0 for padding."""
    index = positions // page_size
    decode_pages = jnp.take_along_axis(fields["decode_pages"], index[None, :rows, None], axis=2)[..., 0]
    if not fields["prefill_tokens"].shape[0]:
        return jnp.where(_live(fields), decode_pages, 0), positions % page_size
    prefill_pages = fields["prefill_pages"][:, fields["prefill_row"], index[rows:]]
    pages = jnp.concatenate([decode_pages, prefill_pages], axis=1)
    return jnp.where(_live(fields), pages, 0), positions % page_size


def _live(fields: dict[str, Any]) -> jax.Array:
    """bool[B + T]: the tokens that are none of padding."""
    decode, count = fields["decode_position"] >= 0, fields["prefill_tokens"].shape[0]
    if not count:
        return decode
    return jnp.concatenate([decode, jnp.arange(count) < fields["prefill_starts"][-1]])


def _sampled_positions(fields: dict[str, Any], rows: int) -> jax.Array:
    """int32[N] rows of the flat batch whose hidden state is sampled from: a chunk's last token."""
    decode = jnp.arange(rows)
    if not fields["prefill_tokens"].shape[0]:
        return decode
    return jnp.concatenate([decode, rows + jnp.maximum(fields["prefill_starts"][1:] - 1, 0)])


def remember(state: SlotState, tokens: jax.Array, fields: dict[str, Any]) -> SlotState:
    """Writes sampled tokens to their slots and counts them for rows with penalties."""
    live = (fields["flags"] & FLAG_LIVE) != 0
    tokens = jnp.maximum(tokens, 0)  # of a row that brought none some id
    slots = jnp.where(live, fields["slot"], state.last_token.shape[0] - 1)
    edits = live & ((fields["flags"] & FLAG_EDITS) != 0)
    counts = state.output_counts.at[slots, tokens].add(edits.astype(jnp.int32))
    return state._replace(last_token=state.last_token.at[slots].set(tokens), output_counts=counts)


def _score_prompt(
    config: ModelConfig, params: Any, hidden: jax.Array, fields: dict[str, Any], rows: int
) -> TokenScores:
    """Scores of each prompt position's next token, `PROMPT_SCORE_ROWS` positions at a time."""
    count = hidden.shape[0]
    num_top = min(MAX_LOGPROBS, config.vocab_size)
    empty = TokenScores(
        jnp.zeros(count, jnp.float32),
        jnp.zeros(count, jnp.int32),
        jnp.zeros((count, num_top), jnp.int32),
        jnp.zeros((count, num_top), jnp.float32),
    )
    block = min(PROMPT_SCORE_ROWS, count)
    blocks = -(-count // block)
    padding = blocks * block - count
    targets = jnp.maximum(fields["prefill_target"], 0)

    def compute(x: jax.Array) -> TokenScores:
        x = jnp.pad(x, ((0, padding), (0, 0))).reshape(blocks, block, -1)
        y = jnp.pad(targets, (0, padding)).reshape(blocks, block)
        everything = jnp.ones(block, jnp.bool_)
        scores = jax.lax.map(lambda xy: score(unembed(config, params, xy[0]), xy[1], everything), (x, y))
        return jax.tree.map(lambda a: a.reshape(blocks * block, *a.shape[2:])[:count], scores)

    wanted = ((fields["flags"][rows:] & FLAG_PROMPT_LOGPROBS) != 0).any()
    return jax.lax.cond(wanted, compute, lambda x: empty, hidden)
