"""Writing Hugging Face's layout of weights: safetensors files of limited size and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.loading.named_tensors import NamedTensor
from jaxserve.loading.safetensors_reader import FLOATS, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_ALIGNMENT = 8


def write_safetensors(
    directory: Path, tensors: Sequence[NamedTensor], max_shard_bytes: int, written: Callable[[NamedTensor], None]
) -> None:
    """Writes `model.safetensors`, or numbered files with an index if they do not fit into one.

    Args:
      tensors: read one at a time, in order.
      max_shard_bytes: of tensors in a file; a larger tensor has a file of its own.
      written: called after each.
    """
    shards: list[list[NamedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0], written)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard, written)
        weight_map.update({tensor.name: name for tensor in shard})
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")


def _write_file(path: Path, tensors: Sequence[NamedTensor], written: Callable[[NamedTensor], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.read())
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), tensor.name
            stream.write(value.reshape(-1).view(np.uint8).data)
            written(tensor)
