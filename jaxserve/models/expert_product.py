"""Products of tokens with the experts they chose: sorted by expert, so that each expert meets its tokens together.

No token is dropped and none waits for room, so what a token gets does not depend on its batch. Choices of nobody
(padding, experts of another device) sort behind all others and cost nothing.

Two ways, of one meaning. `blocks` for CPU: a loop over blocks of a few tokens of one expert, as many as there are, so
an expert that nobody chose is not read. `ragged` for accelerators: `jax.lax.ragged_dot`, which on CPU multiplies with
every expert. [models.md](../../docs/models.md) has figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import ScaledMatrix, scaled_matmul

Mix = Callable[[jax.Array, jax.Array], jax.Array]
"""From gate and up, float32[N, f] each, to what goes down."""


class ExpertWeights(NamedTuple):
    """Gated MLPs.

    Attributes:
      gate, up: [E, d, f], arrays or scaled; then they are multiplied in "blocks", each widening its expert alone.
      down: [E, f, d].
      gate_bias, up_bias, down_bias: [E, f], [E, f], [E, d], or None.
    """

    gate: jax.Array | ScaledMatrix
    up: jax.Array | ScaledMatrix
    down: jax.Array | ScaledMatrix
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def expert_product(x: jax.Array, chosen: jax.Array, weights: ExpertWeights, mix: Mix, *, way: str) -> jax.Array:
    """`down(mix(gate(x), up(x)))` of every token by every expert it chose.

    Args:
      x: [T, d].
      chosen: int32[T, k], experts; E: none.
      way: "blocks" or "ragged", see the module.

    Returns:
      [T, k, d] in x's dtype; 0 where no expert was chosen.
    """
    tokens, count = chosen.shape
    num_experts = weights.gate.shape[0]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    run = {"blocks": _blocks, "ragged": _ragged}[way]
    return run(x, flat, order, sizes, count, weights, mix).reshape(tokens, count, -1)


def _blocks(
    x: jax.Array, flat: jax.Array, order: jax.Array, sizes: jax.Array, count: int, weights: ExpertWeights, mix: Mix
) -> jax.Array:
    num = flat.shape[0]
    # About what an expert has if all are equally likely, so that most need one block.
    rows = min(32, max(4, 1 << (-(-num // sizes.shape[0]) - 1).bit_length()))
    blocks = -(-sizes // rows)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes

    def body(block: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, block, side="right")
        first = (block - (ends[expert] - blocks[expert])) * rows
        within = first + jnp.arange(rows)
        source = order[jnp.minimum(starts[expert] + within, num - 1)]
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), weights)
        y = _mlp(x[source // count], own, mix)
        return out.at[jnp.where(within < sizes[expert], source, num)].set(y, mode="drop")

    return jax.lax.fori_loop(0, ends[-1], body, jnp.zeros((num, x.shape[1]), x.dtype))


def _mlp(x: jax.Array, own: ExpertWeights, mix: Mix) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def linear(x: jax.Array, kernel: jax.Array | ScaledMatrix, bias: jax.Array | None) -> jax.Array:
        scaled = isinstance(kernel, ScaledMatrix)
        product = scaled_matmul(x, kernel) if scaled else jnp.dot(x, kernel, precision=precision)
        return product if bias is None else product + bias

    gate, up = linear(x, own.gate, own.gate_bias), linear(x, own.up, own.up_bias)
    mixed = mix(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(x.dtype)
    return linear(mixed, own.down, own.down_bias)


def _ragged(
    x: jax.Array, flat: jax.Array, order: jax.Array, sizes: jax.Array, count: int, weights: ExpertWeights, mix: Mix
) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    expert = jnp.minimum(flat[order], sizes.shape[0] - 1)

    def linear(x: jax.Array, kernels: jax.Array, biases: jax.Array | None) -> jax.Array:
        product = jax.lax.ragged_dot(x, kernels, sizes, precision=precision)
        return product if biases is None else product + biases[expert]

    rows = x[order // count]
    gate, up = linear(rows, weights.gate, weights.gate_bias), linear(rows, weights.up, weights.up_bias)
    mixed = mix(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(x.dtype)
    y = linear(mixed, weights.down, weights.down_bias)
    is_own = jnp.arange(flat.shape[0]) < sizes.sum()
    return jnp.where(is_own[:, None], y, 0)[jnp.argsort(order)]
