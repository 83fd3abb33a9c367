"""A layer's products with LoRA adapters: the matrices that carry them, and whose columns each token has.

For x [T, in], with every adapter's share in one pair of arrays (`jaxserve.models.lora` says how they lie):

    y = x @ matrix + (x @ a, zero but in the columns of each token's own place) @ b

So tokens of any adapters and of none go through one product of one shape: nothing is gathered or sorted, nothing
compiles when adapters come and go, and a token of no adapter has exactly zero added. Place 0 is no adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import is_packed, packed_matmul


class LoraPair(NamedTuple):
    """All adapters' parts for one matrix [in, out].

    Attributes:
      a: [in, C], or packed; of one adapter, to be placed: [in, rank].
      b: [C, out], or packed; [rank, out].
    """

    a: jax.Array
    b: jax.Array


@dataclass(frozen=True, slots=True)
class LoraTokens:
    """Whose adapter each token of a flat batch has.

    Attributes:
      places: int32[T], 0: none.
      skips_idle: leave out the products when no token has one; for devices on which a branch costs next to nothing.
    """

    places: jax.Array
    skips_idle: bool


@dataclass(frozen=True, slots=True)
class LoraColumns:
    """Which columns are each token's.

    Attributes:
      own: bool[T, C].
      is_idle: bool[], no token has an adapter; None: products are not left out.
    """

    own: jax.Array
    is_idle: jax.Array | None


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A layer's matrix with its adapters, for the tokens of one batch."""

    base: Any
    pair: LoraPair
    columns: LoraColumns

    def add_to(self, product: jax.Array, x: jax.Array) -> jax.Array:
        """`product`, which is `x @ base` [T, out], with each token's adapter added: summed in float32, rounded once."""

        def added(product: jax.Array) -> jax.Array:
            inner = jnp.where(self.columns.own, _matmul(x, self.pair.a), 0).astype(x.dtype)
            return (product.astype(jnp.float32) + _matmul(inner, self.pair.b)).astype(product.dtype)

        if self.columns.is_idle is None:
            return added(product)
        return jax.lax.cond(self.columns.is_idle, lambda product: product, added, product)


def lora_columns(adapters: dict[str, Any], tokens: LoraTokens) -> LoraColumns:
    """The columns of `adapters`, the tree beside the layers, that each token has."""
    own = tokens.places[:, None] == adapters["place_of_column"]
    return LoraColumns(own, (tokens.places == 0).all() if tokens.skips_idle else None)


def adapted(layer: dict[str, Any], pairs: dict[str, Any], columns: LoraColumns | None) -> dict[str, Any]:
    """A layer's parameters with an `AdaptedMatrix` wherever `pairs`, of the same shape, has a pair."""
    if columns is None:
        return layer
    found = dict(layer)
    for name, value in pairs.items():
        if isinstance(value, LoraPair):
            found[name] = layer[name] | {"kernel": AdaptedMatrix(layer[name]["kernel"], value, columns)}
        else:
            found[name] = adapted(layer[name], value, columns)
    return found


def _matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """float32[T, out]."""
    if is_packed(matrix):
        return packed_matmul(x, matrix, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, matrix, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
