"""KVLayout: what two engines must have alike for one to read the other's pages, and which pages a prompt has."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config.engine_config import first_page_seen
from jaxserve.engine import Engine
from jaxserve.models import ModelConfig


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The K/V pages of an engine.

    Attributes:
      model: name of what it serves, for messages alone.
      weights: fingerprint of the model's shape and of a part of its weights.
      page_size: tokens of a page.
      windows: of the groups of layers; 0: they see all tokens.
      leaves: dtype and shape of each array of a page, as "bfloat16[5,1,2,3,16,64]".
    """

    model: str
    weights: str
    page_size: int
    windows: tuple[int, ...]
    leaves: tuple[str, ...]

    @classmethod
    def of(cls, engine: Engine) -> KVLayout:
        """The layout of an engine that has loaded its model."""
        kv = engine.runner.kv_layout
        return cls(
            model=engine.model_name,
            weights=_fingerprint(kv.config, engine.runner.params),
            page_size=kv.page_size,
            windows=tuple(kv.groups.windows),
            leaves=tuple(
                f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(kv.abstract(1))
            ),
        )

    @classmethod
    def from_json(cls, data: Any) -> KVLayout:
        """Of `to_json`.

        Raises:
          ValueError: it is none.
        """
        try:
            return cls(
                str(data["model"]),
                str(data["weights"]),
                int(data["page_size"]),
                tuple(map(int, data["windows"])),
                tuple(map(str, data["leaves"])),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a K/V layout: {str(data)[:80]}") from error

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "model": self.model,
            "weights": self.weights,
            "page_size": self.page_size,
            "windows": list(self.windows),
            "leaves": list(self.leaves),
        }

    def difference(self, other: KVLayout) -> str | None:
        """What keeps this engine's pages from being `other`'s; None when nothing does."""
        if self.weights != other.weights:
            return f"the models differ: {self.model!r} here, {other.model!r} there, or other weights under this name"
        for name, flags in (
            ("page_size", "--page_size"),
            ("windows", "--max_model_len, by which layers are grouped"),
            ("leaves", "--dtype, --kv_cache_dtype and --attention_implementation"),
        ):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name} is {here} here and {there} there; set {flags} alike"
        return None

    @property
    def arrays(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each array of a block of one page; the second dimension counts pages."""
        found = []
        for leaf in self.leaves:
            name, _, shape = leaf.removesuffix("]").partition("[")
            found.append((tuple(map(int, shape.split(","))), jnp.dtype(name)))
        return found

    @property
    def page_bytes(self) -> int:
        """Of a page in one group of layers."""
        return sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in self.arrays)

    def first_pages(self, num_tokens: int) -> list[int]:
        """By group, the first page that the token after `num_tokens` sees."""
        return [first_page_seen(num_tokens, window, self.page_size) for window in self.windows]

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a prompt of `num_tokens`, whole pages, that are sent; in all groups together."""
        count = num_tokens // self.page_size
        return sum(count - first for first in self.first_pages(num_tokens))

    def empty(self, count: int) -> list[np.ndarray]:
        """Arrays for a block of `count` pages."""
        return [np.empty((shape[0], count, *shape[2:]), dtype) for shape, dtype in self.arrays]


def as_bytes(arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """The arrays' bytes where they lie; they must be contiguous."""
    return [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]


_OF_CHECKPOINTS = ("architecture", "names", "unused_layers", "bos_token_id", "pad_token_id", "eos_token_ids")
_FOLLOWING_LENGTH = ("dynamic", "longrope")
"""Kinds of rope by which K depends on the longest context that is served."""


_KV_PROJECTIONS = ("k_proj", "v_proj", "kv_a_proj")


def _fingerprint(config: ModelConfig, params: Any) -> str:
    """Of what K/V follows from: the model's shape, and for its weights the last norm and what makes K and V in layer 0.

    Not of the form in which a checkpoint or the device has them: of a projection the values count, not their places.
    """
    values = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OF_CHECKPOINTS}
    if not any(rope.kind in _FOLLOWING_LENGTH for rope in config.ropes):
        del values["served_length"]
    digest = hashlib.sha256(repr(values).encode())
    digest.update(np.asarray(params["final_norm"]).tobytes())
    layers = params["layers"]
    stacked = not isinstance(layers, list)  # a dict of arrays [L, ...], or a tuple of several
    first = layers if isinstance(layers, dict) else layers[0]
    for name in _KV_PROJECTIONS:
        leaves = jax.tree.leaves(first["attention"].get(name))
        # Of quantised ones the scales.
        digest.update(_values([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)], stacked))
    return digest.hexdigest()[:32]


def _values(leaves: Sequence[jax.Array], stacked: bool) -> bytes:
    """The values in some arrays, or in the first of each stack, but for zeros, with which forms fill up."""
    values = [np.zeros(0, np.float32)]
    for leaf in leaves:
        for shard in leaf.addressable_shards:  # of the whole array jax would keep a copy on the host
            part = np.asarray(shard.data)
            values.append((part[0] if stacked else part).astype(np.float32).reshape(-1))
    found = np.concatenate(values)
    return np.unique(found[found != 0.0]).tobytes()
