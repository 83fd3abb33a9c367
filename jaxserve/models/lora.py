"""LoRA adapters beside a model's weights: their form on devices.

Adapters have places 1 .. max_loras; place 0 is no adapter. All lie side by side in one pair of arrays per matrix: a
place's share is `rank` columns of `a` and the same rows of `b`, which holds the scale (`jaxserve.models.adapted` says
what is done with them). The tree beside the layers is

    {"place_of_column": int32[C], "layers": the layers' tree, with a `LoraPair` for each matrix that can have one}

C is max_loras * rank, filled up to 32s. What no adapter has written is zero; numbers there are always finite, since
zero times infinity would be added to others' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.core import UnsupportedModelError
from jaxserve.models.adapted import LoraPair
from jaxserve.models.config import ModelConfig
from jaxserve.models.leaf_sharding import put_everywhere
from jaxserve.models.sharding import partition_spec
from jaxserve.models.weights import Weight, weights
from pallas_kernels.matmul import can_pack, is_packed, pack

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules whose matrices an adapter may have a part for."""

COLUMNS = 32
"""Columns that a packed matrix keeps together."""
RANK_STEP = 8
NO_PLACE = -1
"""Of columns that fill up."""


def lora_weights(config: ModelConfig) -> list[Weight]:
    """The matrices that adapters of this model may have parts for."""
    return [
        weight
        for weight in weights(config)
        if weight.path[0] == "layers"
        and weight.path[-1] == "kernel"
        and weight.path[-2] in LORA_TARGETS
        and len(weight.shape) == 2
    ]


def stored_rank(max_lora_rank: int) -> int:
    """Columns of a place."""
    return -(-max_lora_rank // RANK_STEP) * RANK_STEP


def lora_tree(config: ModelConfig, pair_of: Callable[[Weight], LoraPair], *, stacked: bool = False) -> Any:
    """A pair of numpy arrays, shapes or shardings for every matrix, in the layers' shape.

    Args:
      stacked: arrays are stacked over layers; shapes and shardings get a first dimension.

    Raises:
      UnsupportedModelError: arrays of layers that differ cannot be stacked.
    """
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for weight in lora_weights(config):
        node: Any = layers
        for key in weight.path[:-2]:
            node = node[key] if isinstance(key, int) else node if key == "layers" else node.setdefault(key, {})
        node[weight.path[-2]] = pair_of(weight)
    if stacked and any(jax.tree.structure(layer) != jax.tree.structure(layers[0]) for layer in layers[1:]):
        raise UnsupportedModelError(
            "LoRA adapters of a model whose layers are of several kinds need unstacked layers (scan_layers=false)"
        )
    return jax.tree.map(_stacked, *layers) if stacked else layers


def abstract_lora(config: ModelConfig, dtype: str, mesh: Mesh, *, form: str, max_loras: int, rank: int) -> Any:
    """Shapes with shardings of the tree beside the layers.

    Args:
      form: of the weights, see `runtime.weights_form`; adapters are packed or stacked as they are.
      rank: columns of a place, from `stored_rank`.
    """
    num_columns = -(-max_loras * rank // COLUMNS) * COLUMNS

    def pair_of(weight: Weight) -> LoraPair:
        rows, out = weight.shape
        return LoraPair(
            part((rows, num_columns), (weight.axes[0], None)), part((num_columns, out), (None, weight.axes[1]))
        )

    def part(shape: tuple[int, int], axes: tuple[str | None, str | None]) -> jax.ShapeDtypeStruct:
        spec = partition_spec(config, axes, mesh)
        if form == "packed" and can_pack(shape, jnp.dtype(dtype)):
            packed = jax.eval_shape(pack, jax.ShapeDtypeStruct(shape, dtype))
            return jax.ShapeDtypeStruct(packed.shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    places = jax.ShapeDtypeStruct((num_columns,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return {"place_of_column": places, "layers": lora_tree(config, pair_of, stacked=form == "stacked")}


def empty_lora(shapes: Any, *, max_loras: int, rank: int) -> Any:
    """Arrays of `abstract_lora`'s shapes in which no place holds anything."""
    places = np.full(shapes["place_of_column"].shape, NO_PLACE, np.int32)
    places[: max_loras * rank] = 1 + np.arange(max_loras * rank) // rank
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes["layers"]),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes["layers"]),
    )()
    return {"place_of_column": put_everywhere(places, shapes["place_of_column"].sharding), "layers": zeros}


def zero_lora(config: ModelConfig, dtype: str, rank: int, *, stacked: bool) -> Any:
    """Host arrays of one adapter that adds nothing, as `place_lora` takes them."""
    kind = jnp.dtype(dtype)
    return lora_tree(
        config,
        lambda weight: LoraPair(
            np.zeros((weight.shape[0], rank), kind),  # type: ignore[arg-type]
            np.zeros((rank, weight.shape[1]), kind),  # type: ignore[arg-type]
        ),
        stacked=stacked,
    )


def place_lora(layers: Any, new: Any, place: jax.Array) -> Any:
    """`layers` of the tree with an adapter in a place. Jitted with `layers` donated.

    Args:
      new: of the same shape, pairs [in, rank] and [rank, out], stacked where those are.
      place: int32[], from 1 on.
    """

    def put(old: LoraPair, pair: LoraPair) -> LoraPair:
        rank = pair.a.shape[-1]
        first = (place - 1) * rank
        return LoraPair(_with_columns(old.a, pair.a, first), _with_rows(old.b, pair.b, first))

    return jax.tree.map(put, layers, new, is_leaf=lambda node: isinstance(node, LoraPair))


def _with_columns(stored: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    if not is_packed(stored):
        return jax.lax.dynamic_update_slice_in_dim(stored, new, first, axis=stored.ndim - 1)
    rows, rank = new.shape
    pairs = stored.shape[3]
    columns = first + jnp.arange(rank)
    values = new.T.reshape(rank, rows // pairs, pairs)
    return stored.at[columns // COLUMNS, :, columns % COLUMNS, :].set(values)


def _with_rows(stored: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    if not is_packed(stored):
        return jax.lax.dynamic_update_slice_in_dim(stored, new, first, axis=stored.ndim - 2)
    return jax.lax.dynamic_update_slice_in_dim(stored, pack(new), first // stored.shape[3], axis=1)


def _stacked(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, np.ndarray):
        return np.stack(leaves)
    assert isinstance(first, jax.ShapeDtypeStruct), first
    sharding = first.sharding
    assert isinstance(sharding, NamedSharding), sharding
    spec = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype, sharding=spec)
