"""Hugging Face directories: config.json and safetensors files, single or sharded by an index.

The format is read here rather than by its library so that a damaged file is told apart by file and tensor, and
so that bfloat16 reads without a framework. Layout: uint64 header length, JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import Part
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.mapped_file import map_part

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: `begin` is its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsReader:
    """A directory in Hugging Face layout."""

    def __init__(self, directory: Path) -> None:
        """Reads configuration and headers.

        Raises:
          CheckpointError: a file is missing, damaged or shorter than its header says.
        """
        self.name = str(directory)
        self.hf_config = read_json_object(directory / "config.json")
        generation = directory / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.is_file() else {}
        self._entries: dict[str, Entry] = {}
        for file, wanted in _shards(directory).items():
            found = read_header(file)
            for name in wanted - found.keys():
                raise CheckpointError(f"{file} lacks tensor {name}, which {directory / INDEX} places there")
            self._entries.update(found)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        entry = self._entries[name]
        dtype = FLOATS.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; weights must be one of {', '.join(FLOATS)}"
            )
        return dtype

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        return self._mapped(name, self.dtype(name), part)

    def read_bytes(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        """A tensor of dtype U8, or a part of it.

        Raises:
          CheckpointError: it has another dtype.
        """
        entry = self._entries[name]
        if entry.dtype != "U8":
            raise CheckpointError(f"{entry.file}: tensor {name} has dtype {entry.dtype}; it must be U8")
        return self._mapped(name, np.dtype(np.uint8), part)

    def _mapped(self, name: str, dtype: np.dtype[Any], part: Part) -> np.ndarray[Any, Any]:
        entry = self._entries[name]
        return map_part(entry.file, name, dtype, entry.shape, entry.begin, part)


def is_safetensors_directory(path: Path) -> bool:
    """Whether `path` holds safetensors weights."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file() or any(path.glob("*.safetensors"))


def _shards(directory: Path) -> dict[Path, set[str]]:
    """Files to read, each with the tensors that must be in it (none known without an index)."""
    index_file = directory / INDEX
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    if index_file.is_file():
        weight_map = read_json_object(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_file} has no weight_map; it must map tensor names to files")
        shards: dict[Path, set[str]] = {}
        for tensor, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index_file} places {tensor} in {file_name!r}; it must be a plain file name")
            shards.setdefault(directory / file_name, set()).add(tensor)
        return dict(sorted(shards.items()))
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return {file: set() for file in files}
    raise CheckpointError(f"{directory} holds no safetensors file; other weight formats must be converted first")


def read_header(file: Path, max_bytes: int = _MAX_HEADER_BYTES) -> dict[str, Entry]:
    """Where each tensor of a file lies.

    Args:
      max_bytes: of the header.

    Raises:
      CheckpointError: the file cannot be read, or is damaged or shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, max_bytes):
                raise CheckpointError(f"{file} has {size} bytes and a header of {length}; it is damaged or cut short")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has no valid safetensors header: it is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    return {name: _entry(file, name, value, data_start, size) for name, value in header.items()}


def _entry(file: Path, name: str, value: Any, data_start: int, size: int) -> Entry:
    try:
        dtype, shape = str(value["dtype"]), tuple(value["shape"])
        begin, end = value["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry of tensor {name} is damaged") from error
    item_bytes = FLOATS[dtype].itemsize if dtype in FLOATS else _BYTES.get(dtype)
    if item_bytes is None:
        raise CheckpointError(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    if not whole or end - begin != math.prod(shape) * item_bytes:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)} and dtype {dtype} does not fill its bytes {begin} to {end}"
        )
    if data_start + end > size:
        raise CheckpointError(
            f"{file} has {size} bytes and tensor {name} ends at {data_start + end}; the file is cut short"
        )
    return Entry(file, dtype, shape, data_start + begin)
