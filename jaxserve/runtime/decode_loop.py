"""The decode loop: several decode steps in one program, without the host between them.

Each step is what the two programs of a single one are, `hidden_states` and `unembed`, then `sample` and `remember`; its
tokens are the next one's inputs. A row goes on until its own number of steps, an id that ends it or broken logits, and
is padding from then on: position -1, the scratch slot, no flags. The loop ends with its last row, so one compiled
program serves every number of steps. Sampling keys come from the write index, as always, so tokens are those of single
steps.

A row may come after its request has ended: the host had not seen that when it planned. Its input token shows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models import unembed
from jaxserve.runtime.kv_pool import KVPool, PoolLayout
from jaxserve.runtime.sampler import NOT_A_NUMBER, sample
from jaxserve.runtime.slot_state import SlotState
from jaxserve.runtime.steps import hidden_states, remember
from jaxserve.tables.layout import FLAG_HOLD_STOPS, TableLayout


class _Loop(NamedTuple):
    """What a step hands to the next.

    Attributes:
      step: int32[], steps done.
      live: bool[B], rows that have a next step.
      pool, state: as they come and go.
      tokens: int32[max_steps, B], -1 where a row had no such step.
    """

    step: jax.Array
    live: jax.Array
    pool: KVPool
    state: SlotState
    tokens: jax.Array


def make_decode_loop(kv: PoolLayout, layout: TableLayout, max_steps: int, logits_sharding: Any) -> Any:
    """The function that runs several decode steps of one bucket.

    Args:
      kv: model, devices and KV pool.
      layout: field places of a bucket of decode rows alone.
      max_steps: rows of the tokens; the caller asks for no more steps.
      logits_sharding: of float32[B, V], as the single step leaves them to its sampler.

    Returns:
      `loop(params, pool, state, ints, floats, limits) -> (pool, state, tokens)`, to be jitted with `pool` and `state`
      donated. `limits` is int32[B, LIMIT_COLUMNS], tokens int32[max_steps, B]: a row's tokens in order, of
      broken logits `NOT_A_NUMBER`, which ends it, then -1.
    """
    config, bucket = kv.config, layout.bucket
    rows = bucket.decode_rows
    assert not bucket.prefill_tokens, f"bucket {bucket.name} has prompt tokens; a decode loop has none"

    def loop(
        params: Any, pool: KVPool, state: SlotState, ints: jax.Array, floats: jax.Array, limits: jax.Array
    ) -> tuple[KVPool, SlotState, jax.Array]:
        fields = layout.unpack(ints, floats)
        first, num_steps, held_below, stop_ids = fields["decode_position"], limits[:, 0], limits[:, 1], limits[:, 2:]
        scratch = state.last_token.shape[0] - 1
        no_masks = jnp.zeros((rows, -(-config.vocab_size // 32)), jnp.uint32)  # no row is flagged to read any

        def ends(token_ids: jax.Array, positions: jax.Array) -> jax.Array:
            """bool[B]: a token at such a write index ends its row's request."""
            return (token_ids[:, None] == stop_ids).any(axis=1) & (positions >= held_below)

        def run_step(now: _Loop) -> _Loop:
            position = first + now.step
            held = (position + 1 < held_below).astype(jnp.int32) * FLAG_HOLD_STOPS
            slots = jnp.where(now.live, fields["slot"], scratch)
            current = fields | {
                "decode_position": jnp.where(now.live, position, -1),
                "decode_slot": slots,
                "slot": slots,
                "sample_position": position + 1,
                "flags": jnp.where(now.live, (fields["flags"] & ~FLAG_HOLD_STOPS) | held, 0),
            }
            hidden, pool = hidden_states(kv, bucket, params, now.pool, now.state.last_token, current)
            logits = jax.lax.with_sharding_constraint(unembed(config, params, hidden), logits_sharding)
            sampled = sample(logits, now.state, current, no_masks)
            state = remember(now.state, sampled, current)
            tokens = now.tokens.at[now.step].set(jnp.where(now.live, sampled, -1))
            ended = ends(sampled, position + 1) | (sampled == NOT_A_NUMBER)
            live = now.live & (now.step + 1 < num_steps) & ~ended
            return _Loop(now.step + 1, live, pool, state, tokens)

        live = (num_steps > 0) & ~ends(state.last_token[fields["decode_slot"]], first)
        begin = _Loop(jnp.int32(0), live, pool, state, jnp.full((max_steps, rows), -1, jnp.int32))
        end = jax.lax.while_loop(lambda now: now.live.any(), run_step, begin)
        return end.pool, end.state, end.tokens

    return loop
