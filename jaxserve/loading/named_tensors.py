"""The tensors of a checkpoint under the names of a weight table: what a converter writes, one by one.

Where source and target have the same names a tensor is taken as it is. Else it is put together from the weights that
share it, each read through the source's own table: experts that lie apart go into one tensor, fused matrices apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.core import UnsupportedModelError
from jaxserve.loading.checkpoint import CheckpointReader
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import Weight, weights

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor to be written.

    Attributes:
      read: gives it, of that shape and dtype; it may be a view of a file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]

    @property
    def num_bytes(self) -> int:
        """Its size as it is written."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def stored_dtype(weight: Weight, reader: CheckpointReader, asked: np.dtype[Any] | None) -> np.dtype[Any]:
    """What a weight is written in.

    Args:
      asked: None: as the source has it.
    """
    if asked is not None:
        return np.dtype(np.float32) if weight.is_float32 else asked
    return _common(reader.dtype(name) for name in weight.tensors)


def _common(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    found = set(dtypes)
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def as_dtype(name: str, value: Array, dtype: np.dtype[Any]) -> Array:
    """A tensor in another dtype, or itself.

    Raises:
      UnsupportedModelError: it has numbers that are too large for it.
    """
    if value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        other = value.astype(dtype)
    if (
        ml_dtypes.finfo(value.dtype).max > ml_dtypes.finfo(dtype).max
        and not np.isfinite(other[np.isfinite(value)]).all()
    ):
        raise UnsupportedModelError(f"tensor {name} has numbers beyond {dtype.name}; ask for bfloat16 or float32")
    return other


def named_tensors(
    reader: CheckpointReader, source: ModelConfig, target: ModelConfig, dtype: np.dtype[Any] | None
) -> list[NamedTensor]:
    """Every tensor of a checkpoint with `target`'s names, in the order of its weight table.

    Args:
      reader: the source.
      source, target: the same model; `names` may differ.
      dtype: of all but what is float32 in every model; None: as the source has it.
    """
    own = {weight.path: weight for weight in weights(source)}
    sharers: dict[str, list[tuple[Weight, int | None]]] = {}
    for weight in weights(target):
        has_each = "{}" in weight.hf_name
        for expert, name in enumerate(weight.tensors):
            sharers.setdefault(name, []).append((weight, expert if has_each else None))

    def tensor(name: str) -> NamedTensor:
        found = sharers[name]
        shape = tuple(map(max, zip(*(weight.tensor_shape for weight, _ in found), strict=True)))
        if source.names == target.names:
            weight = found[0][0]
            kind = (np.dtype(np.float32) if weight.is_float32 else dtype) if dtype is not None else reader.dtype(name)
            return NamedTensor(name, shape, kind, lambda: as_dtype(name, reader.read(name), kind))
        kind, stored = (
            _common(stored_dtype(own[weight.path], reader, each) for weight, _ in found) for each in (dtype, None)
        )

        def read() -> Array:
            value = np.empty(shape, stored)
            for weight, expert in found:
                index = () if expert is None else (slice(expert, expert + 1),)
                part = own[weight.path].read(reader.read, stored, index)
                weight.put(value, part if expert is None else part[0])
            return as_dtype(name, value, kind)

        return NamedTensor(name, shape, kind, read)

    return [tensor(name) for name in sharers]
