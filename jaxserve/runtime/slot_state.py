"""SlotState: what the device keeps per slot between steps.

`last_token` makes a decode table independent of the host: the token sampled in one step is the input
of the next without a round trip. The dense rows (bias, held-off stop ids, prompt mask, output counts)
belong to requests that edit logits; they are written when such a request takes a slot and are ignored,
stale or not, for all others. One extra row, the scratch slot, takes what padding rows write.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core import Request

NEVER = -1e30
"""Added to what must not be sampled; finite, so that a row of it still has a maximum."""
OUTSIDE_MASK = -1e34
"""Logit of a token that its row's mask does not allow: below `NEVER`, so that no other setting brings it back, and
finite over the lowest temperature."""


class SlotState(NamedTuple):
    """Arrays of B + 1 slots (the last is scratch) and V vocabulary entries.

    Attributes:
      last_token: int32[B + 1].
      bias: float32[B + 1, V], added to logits; `NEVER` for ids that the request bars.
      stop_mask: bool[B + 1, V], ids held off while min_tokens is not reached.
      prompt_mask: bool[B + 1, V], ids that occur in the prompt.
      output_counts: int32[B + 1, V], how often each id was sampled.
    """

    last_token: jax.Array
    bias: jax.Array
    stop_mask: jax.Array
    prompt_mask: jax.Array
    output_counts: jax.Array


class SampledState(NamedTuple):
    """What a step changes of `SlotState`."""

    last_token: jax.Array
    output_counts: jax.Array


class EditState(NamedTuple):
    """What a step reads of `SlotState` and leaves as it is."""

    bias: jax.Array
    stop_mask: jax.Array
    prompt_mask: jax.Array


def split_state(state: SlotState) -> tuple[SampledState, EditState]:
    """The two parts."""
    return (
        SampledState(state.last_token, state.output_counts),
        EditState(state.bias, state.stop_mask, state.prompt_mask),
    )


def join_state(sampled: SampledState, edits: EditState) -> SlotState:
    """The whole of two parts."""
    return SlotState(sampled.last_token, *edits, sampled.output_counts)


class SlotRow(NamedTuple):
    """One slot's values, as `SlotState` without the slot dimension."""

    last_token: np.ndarray
    bias: np.ndarray
    stop_mask: np.ndarray
    prompt_mask: np.ndarray
    output_counts: np.ndarray


def abstract_slot_state(max_num_seqs: int, vocab_size: int) -> SlotState:
    """Shapes and dtypes of the state."""
    rows = max_num_seqs + 1
    return SlotState(
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.bool_),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.bool_),
        jax.ShapeDtypeStruct((rows, vocab_size), jnp.int32),
    )


def slot_row(request: Request, output_token_ids: list[int], last_token_id: int, vocab_size: int) -> SlotRow:
    """The row of a request that takes a slot, `output_token_ids` being what it sampled before."""
    stop_mask = np.zeros(vocab_size, np.bool_)
    prompt_mask = np.zeros(vocab_size, np.bool_)
    counts = np.zeros(vocab_size, np.int32)
    stop_mask[list(request.stop_ids)] = True
    prompt_mask[np.asarray(request.prompt_token_ids)] = True
    np.add.at(counts, np.asarray(output_token_ids, np.int64), 1)
    return SlotRow(
        np.asarray(max(last_token_id, 0), np.int32), _bias(request, vocab_size), stop_mask, prompt_mask, counts
    )


def _bias(request: Request, vocab_size: int) -> np.ndarray:
    params = request.params
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = NEVER
        bias[np.asarray(params.allowed_token_ids)] = 0
    for token_id, value in params.logit_bias.items():
        bias[token_id] += value
    bias[list(request.bad_token_ids)] = NEVER
    return bias


def place_row(state: SlotState, slot: jax.Array, row: SlotRow) -> SlotState:
    """Writes `row` into `slot`. Jitted with `state` donated."""
    return SlotState(*(array.at[slot].set(value) for array, value in zip(state, row, strict=True)))
