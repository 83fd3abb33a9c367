"""Sampling, fused into the step: logits of N rows in, one token id per row out.

Every row has its own settings and its own key, `fold_in(request key, write index of the token)`, so a
row's result depends on its logits alone: not on its slot, its batch mates or a preemption in between.

Order: logit bias and held-off stop ids, penalties, the row's mask, temperature, top-k, top-p, min-p. The mask
comes after everything that moves logits, so nothing brings a masked token back; top-k and the others choose from what
is left.
Work that no row asks for is skipped by `lax.cond` on a scalar, inside one compiled program: a batch of
greedy rows costs an argmax of the logits where they lie. A `cond` that hands logits on unchanged copies them, so
greedy batches branch off before the first.

Top-k and top-p need no sort. Both keep {x >= t} for some threshold t among the row's values, so t is
found by bisection over the 32-bit patterns of float32 ordered as integers: 32 passes of compare and
reduce, exact, and far cheaper than sorting a 49k or 128k vocabulary. Ties with the threshold are kept.

The draw inverts the cumulative distribution with one uniform number per row, in two levels (blocks,
then inside the block) to keep partial sums short and accurate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core import MAX_LOGPROBS
from jaxserve.runtime.slot_state import NEVER, OUTSIDE_MASK, SlotState
from jaxserve.tables.layout import FLAG_EDITS, FLAG_HOLD_STOPS, FLAG_LOGPROBS, FLAG_MASKED

NOT_A_NUMBER = -2
"""In place of the token of a row whose logits are broken: the largest of them is NaN or infinite."""
ARGMAX_BLOCK = 256
"""Entries of a row in a block of `first_largest`: of the order of the root of a vocabulary's size."""


class TokenScores(NamedTuple):
    """Raw log-probabilities for N rows; zeros where nobody asked.

    Attributes:
      logprob: float32[N] of the chosen token.
      rank: int32[N], 1 for the likeliest.
      top_ids: int32[N, K], likeliest first, K = min(`MAX_LOGPROBS`, V).
      top_logprobs: float32[N, K].
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, state: SlotState, fields: dict[str, Any], masks: jax.Array) -> jax.Array:
    """Chooses one token per row.

    Args:
      logits: float32[N, V], the model's own.
      state: per-slot rows; read for rows flagged `FLAG_EDITS`.
      fields: sample columns of `TableLayout`, each [N].
      masks: uint32[N, ceil(V / 32)], bit i % 32 of word i // 32: token i is allowed. Read for rows flagged
        `FLAG_MASKED`, which have at least one such bit.

    Returns:
      int32[N] token ids; `NOT_A_NUMBER` for rows whose logits are broken. Padding rows get anything.
    """
    flags = fields["flags"]
    edits = (flags & FLAG_EDITS) != 0
    bound = (flags & FLAG_MASKED) != 0
    random = fields["temperature"] > 0

    def choose(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(edits.any(), lambda y: _edit(y, state, fields, edits), lambda y: y, x)
        x = jax.lax.cond(bound.any(), lambda y: _keep_allowed(y, masks, bound), lambda y: y, x)
        greedy, largest = first_largest(x)
        tokens = jax.lax.cond(
            random.any(),
            lambda y: jnp.where(random, _draw(y, fields), greedy),
            lambda y: greedy,
            x,
        )
        # A penalty may make a logit infinite, which is no fault of the model.
        raw = _at(logits, greedy)
        return jnp.where(jnp.isnan(largest) | ~(raw < jnp.inf), NOT_A_NUMBER, tokens)

    def choose_largest(x: jax.Array) -> jax.Array:
        greedy, largest = first_largest(x)
        return jnp.where(largest < jnp.inf, greedy, NOT_A_NUMBER)

    return jax.lax.cond((edits | bound | random).any(), choose, choose_largest, logits)


def first_largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`argmax` of each row, the lowest index among equals, and what is there.

    XLA CPU does not vectorise the reduction of (value, index) pairs that argmax is. There, maxima of blocks are taken
    first, which it does vectorise, and a row's argmax is sought among them and within one block; other backends run
    argmax as it is.

    Args:
      x: float32[N, V], finite or infinite below 1e36 (a block's sum must not overflow). A row with NaN gives its
        first NaN, on CPU possibly an earlier infinity.

    Returns:
      int32[N] and float32[N].
    """
    return jax.lax.platform_dependent(x, cpu=_first_largest_by_blocks, default=_first_largest)


def _first_largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    index = _argmax(x)
    return index, _at(x, index)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """float32[N]: of each row of [N, V] what is at its index, which is in range."""
    return jnp.take_along_axis(x, index[:, None], axis=-1, mode="promise_in_bounds")[:, 0]


def _argmax(x: jax.Array) -> jax.Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _first_largest_by_blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = x.shape[1]
    block = min(ARGMAX_BLOCK, size)

    def of_blocks(start: float, reducer: Any) -> jax.Array:
        return jax.lax.reduce_window(x, start, reducer, (1, block), (1, block), ((0, 0), (0, -size % block)))

    # XLA CPU's max drops NaN, a sum keeps it. Infinities of both signs sum to NaN too: infinite is the maximum then.
    largest = jnp.where(jnp.isnan(of_blocks(0.0, jax.lax.add)), jnp.inf, of_blocks(-jnp.inf, jax.lax.max))
    # A last block that is not whole begins earlier: what it shares with the one before is less than its maximum.
    starts = jnp.minimum(_argmax(largest) * block, size - block)
    inside = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (block,)))(x, starts)
    index, value = _first_largest(inside)
    return starts + index, value


def score(logits: jax.Array, token_ids: jax.Array, wanted: jax.Array) -> TokenScores:
    """Log-probabilities of `token_ids` and of the likeliest alternatives, if `wanted` has any.

    Args:
      logits: float32[N, V].
      token_ids: int32[N].
      wanted: bool[N].
    """
    rows, vocab = logits.shape
    num_top = min(MAX_LOGPROBS, vocab)

    def compute(x: jax.Array) -> TokenScores:
        logprobs = jax.nn.log_softmax(x, axis=-1)
        chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
        rank = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
        top, ids = jax.lax.top_k(logprobs, num_top)
        return TokenScores(chosen[:, 0], rank, ids.astype(jnp.int32), top)

    def skip(x: jax.Array) -> TokenScores:
        return TokenScores(
            jnp.zeros(rows, jnp.float32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, num_top), jnp.int32),
            jnp.zeros((rows, num_top), jnp.float32),
        )

    return jax.lax.cond(wanted.any(), compute, skip, logits)


def wants_logprobs(fields: dict[str, Any]) -> jax.Array:
    """bool[N]: rows flagged for log-probabilities."""
    return (fields["flags"] & FLAG_LOGPROBS) != 0


def _edit(logits: jax.Array, state: SlotState, fields: dict[str, Any], edits: jax.Array) -> jax.Array:
    """Bias, held-off stop ids and penalties, for the rows of `edits`."""
    slots = fields["slot"]
    counts = state.output_counts[slots]
    held = (fields["flags"] & FLAG_HOLD_STOPS) != 0
    x = logits + state.bias[slots]
    seen = (counts > 0) | state.prompt_mask[slots]
    factor = fields["repetition_penalty"][:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
    x = x - fields["frequency_penalty"][:, None] * counts
    x = x - fields["presence_penalty"][:, None] * (counts > 0)
    x = jnp.where(state.stop_mask[slots] & held[:, None], NEVER, x)
    return jnp.where(edits[:, None], x, logits)


def _keep_allowed(logits: jax.Array, masks: jax.Array, bound: jax.Array) -> jax.Array:
    """Puts the tokens that the masks of the rows of `bound` do not allow out of reach."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~bound[:, None], logits, OUTSIDE_MASK)


def _draw(logits: jax.Array, fields: dict[str, Any]) -> jax.Array:
    """Samples every row at its temperature; greedy rows are computed and not used."""
    temperature = fields["temperature"][:, None]
    # Shifted first: where all that is left was put out of reach, one rounding of a quotient is more than any logit.
    x = logits - logits.max(axis=-1, keepdims=True)
    x = x / jnp.where(temperature > 0, temperature, 1.0)
    top_k, top_p, min_p = fields["top_k"], fields["top_p"], fields["min_p"]
    x = jax.lax.cond((top_k > 0).any(), lambda y: _keep_top_k(y, top_k), lambda y: y, x)
    x = jax.lax.cond((top_p < 1).any(), lambda y: _keep_top_p(y, top_p), lambda y: y, x)
    # exp(x) is the probability relative to the likeliest token, whose x is 0.
    weights = jnp.exp(x)
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    keys = jax.vmap(_row_key)(fields["seed_high"], fields["seed_low"], fields["sample_position"])
    uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)
    return _inverse_cdf(weights, uniform)


def _row_key(high: jax.Array, low: jax.Array, position: jax.Array) -> jax.Array:
    words = jax.lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)


def _keep_top_k(x: jax.Array, top_k: jax.Array) -> jax.Array:
    """Masks all but the `top_k` largest of each row (0: all; ties with the k-th are kept)."""
    wanted = jnp.where(top_k > 0, top_k, x.shape[-1])
    threshold = _largest_key(x, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= wanted)
    return jnp.where(_ordered(x) >= threshold[:, None], x, NEVER)


def _keep_top_p(x: jax.Array, top_p: jax.Array) -> jax.Array:
    """Masks all but the smallest set of largest values whose softmax mass reaches `top_p`."""
    weights = jnp.exp(x)
    # The mass of a set summed in float32 may fall short of the total by rounding: stay under it.
    wanted = jnp.minimum(top_p, 1.0 - 1e-6) * weights.sum(axis=-1)
    threshold = _largest_key(x, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= wanted)
    # The likeliest stays whatever rounding does to the threshold: x is 0 there.
    keep = (_ordered(x) >= threshold[:, None]) | (top_p >= 1)[:, None] | (x >= 0)
    return jnp.where(keep, x, NEVER)


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(x: jax.Array, enough: Any) -> jax.Array:
    """Per row the largest key t for which `enough({x >= t})` holds; it must hold for t = 0.

    Builds t bit by bit from the top: `enough` is monotone, larger sets being enough if smaller are.
    """
    keys = _ordered(x)

    def body(bit: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(enough(keys >= candidate[:, None]), candidate, found)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(x.shape[0], jnp.uint32))


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index at which the running sum of a row exceeds `uniform` times its total.

    Never an index of weight 0: a running sum does not grow there. Where rounding leaves the target at
    or above the last running sum, the last index with weight is taken. A row without any weight (its
    logits were NaN) gives an index of the row all the same.
    """
    rows, size = weights.shape
    block = max(1, int(size**0.5))
    blocks = -(-size // block)
    grid = jnp.pad(weights, ((0, 0), (0, blocks * block - size))).reshape(rows, blocks, block)
    sums = jnp.cumsum(grid.sum(axis=-1), axis=-1)
    target = uniform * sums[:, -1]
    index = _first_above(sums, target, grid.sum(axis=-1) > 0)
    row = jnp.arange(rows)
    before = jnp.where(index > 0, sums[row, index - 1], 0.0)
    inside = grid[row, index]
    offset = _first_above(jnp.cumsum(inside, axis=-1), target - before, inside > 0)
    return jnp.minimum(index * block + offset, size - 1).astype(jnp.int32)


def _first_above(sums: jax.Array, target: jax.Array, valid: jax.Array) -> jax.Array:
    """First valid index with `sums > target` per row, else the last valid one."""
    above = (sums > target[:, None]) & valid
    last = sums.shape[-1] - 1 - jnp.argmax(valid[:, ::-1], axis=-1)
    return jnp.where(above.any(axis=-1), jnp.argmax(above, axis=-1), last)
