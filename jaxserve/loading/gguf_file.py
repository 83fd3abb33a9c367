"""The GGUF container: metadata and tensor table of a file, checked against its size. numpy only.

Layout, little-endian: magic, version, tensor count, metadata count, metadata (key, type, value), tensor table
(name, dimensions, type, offset), then the tensors, aligned. Every length is checked before it is used, so a
damaged file gives an error that names what is wrong, never a crash or an allocation of its size.

The `gguf` package supplies the quantisation types and dequantises; its own reader takes seconds on a large
vocabulary and answers damage with index errors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.core import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_DIMENSIONS = 8
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place.

    Attributes:
      file: where it lies.
      quantisation: its type.
      shape: row-major, so the reverse of how the file lists it.
      begin, num_bytes: its bytes in the file.
    """

    file: Path
    quantisation: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file, or the parts of a split one.

    Attributes:
      path: the (first) file.
      metadata: values by key: int, float, bool, str or a list of them.
      tensors: by their GGUF names.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses the header of a file and, if it is the first of a split model, of its other parts.

    Raises:
      CheckpointError: a file is missing, damaged, cut short or of another version.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return first
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise CheckpointError(
            f"{path} is part of a model split into {count} files; give the first, named like"
            f" name-00001-of-{count:05d}.gguf"
        )
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        tensors.update(_read_one(path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")).tensors)
    return GgufFile(path, first.metadata, tensors)


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error


class _Parser:
    """Walks over the header; `_at` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not start with GGUF")
        version = self._number("<I", 4)
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise CheckpointError(f"{self._path} has GGUF version {version}; versions {known} (little-endian) are read")
        num_tensors, num_entries = self._number("<Q", 8), self._number("<Q", 8)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number("<I", 4))
        table = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}; it must be a positive integer")
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, {entry[0]: self._tensor(*entry, start) for entry in table})

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("<I", 4)
        if num_dimensions > _MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name} has {num_dimensions} dimensions; the file is damaged")
        shape = tuple(self._number("<Q", 8) for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I", 4), self._number("<Q", 8)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: tensor {name} has the unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if 0 in shape:
            raise CheckpointError(f"{self._path}: tensor {name} of shape {list(shape)} is empty; the file is damaged")
        if not shape or shape[-1] % block:
            raise CheckpointError(
                f"{self._path}: tensor {name} of shape {list(shape)} does not hold whole blocks of {block}"
                f" ({quantisation.name})"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        begin = start + offset
        if begin + num_bytes > self._size:
            raise CheckpointError(
                f"{self._path} has {self._size} bytes and tensor {name} ends at {begin + num_bytes};"
                " the file is cut short"
            )
        return GgufTensor(self._path, quantisation, shape, begin, num_bytes)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise CheckpointError(f"{self._path} has {self._size} bytes and its header goes on; the file is cut short")
        data = self._data[self._at : end]
        self._at = end
        return data

    def _number(self, form: str, size: int) -> int:
        value: int = struct.unpack(form, self._take(size))[0]
        return value

    def _string(self) -> str:
        return self._take(self._number("<Q", 8)).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        if kind != _ARRAY:
            raise CheckpointError(f"{self._path}: metadata of unknown type {kind}; the file is damaged")
        item_kind, count = self._number("<I", 4), self._number("<Q", 8)
        if item_kind in _SCALARS:
            dtype = _SCALARS[item_kind]
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if item_kind == _STRING:
            return [self._string() for _ in range(count)]
        raise CheckpointError(f"{self._path}: an array of metadata type {item_kind} is not known; the file is damaged")
