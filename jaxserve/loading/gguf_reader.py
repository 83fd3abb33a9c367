"""GGUF checkpoints: tensors under Hugging Face names, dequantised or as blocks, query and key rows in their order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.core import UnsupportedModelError
from jaxserve.loading.gguf_blocks import unpack
from jaxserve.loading.gguf_config import ROPE_TENSORS, architecture, hf_config, hf_name, special_token_ids
from jaxserve.loading.gguf_file import GgufTensor, read_gguf
from jaxserve.loading.mapped_file import map_tensor
from pallas_kernels.matmul import Blocks

_FLOATS = {
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_VALUES_AT_ONCE = 1 << 20
_QUERY, _KEY = ".self_attn.q_proj.", ".self_attn.k_proj."


class GgufReader:
    """A .gguf file, or a model split into several."""

    def __init__(self, path: Path) -> None:
        """Parses the header.

        Raises:
          CheckpointError: the file is damaged or lacks needed metadata.
          UnsupportedModelError: an architecture that is not known.
        """
        gguf = read_gguf(path)
        self.name = str(path)
        self._architecture = architecture(gguf)
        factors = {
            name: _dequantised(gguf.tensors[name], name).ravel().tolist()
            for name in ROPE_TENSORS
            if name in gguf.tensors
        }
        self.hf_config: dict[str, Any] = hf_config(gguf, factors)
        self.generation_config: dict[str, Any] = special_token_ids(gguf.metadata)
        self._tensors: dict[str, GgufTensor] = {}
        for own_name, tensor in gguf.tensors.items():
            name = hf_name(own_name, self._architecture)
            if "{}" in name:
                self._tensors.update((name.format(i), _expert_of(tensor, i)) for i in range(tensor.shape[0]))
            elif own_name not in ROPE_TENSORS:
                self._tensors[name] = tensor

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def quantisation(self, name: str) -> GGMLQuantizationType:
        """How a tensor is stored."""
        return self._tensors[name].quantisation

    def stored_dtype(self, name: str) -> np.dtype[Any] | None:
        return _FLOATS.get(self.quantisation(name))

    def read(self, name: str, rows: range | None = None) -> np.ndarray[Any, Any]:
        value = _dequantised(_rows_of(self._tensors[name], rows), name)
        if self._architecture.norms_hold_one and name.endswith("norm.weight"):
            return value - 1  # in float32, so a weight that was bfloat16 once comes back
        return self._in_order(value, name)

    def blocks(self, name: str, rows: range | None = None) -> Callable[[slice], Blocks]:
        """A function that gives the blocks of some of the rows of a tensor of a format that `gguf_blocks` knows."""
        tensor = _rows_of(self._tensors[name], rows)
        data = self._in_order(_mapped(tensor, name), name)
        return lambda part: unpack(data[part], tensor.quantisation)

    def _in_order(self, rows: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        """The rows of a whole tensor, quantised or not, in the order of a Hugging Face checkpoint."""
        if self._architecture.permuted and _QUERY in name:
            return unpermute(rows, self.hf_config["num_attention_heads"])
        if self._architecture.permuted and _KEY in name:
            return unpermute(rows, self.hf_config["num_key_value_heads"])
        return rows


def unpermute(value: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's reordering of query and key rows.

    llama.cpp turns neighbouring rows of a head together (2i with 2i + 1) and stores them so; half-split rope
    turns row i with row i + D / 2.

    Args:
      value: [num_heads * D, ...].
      num_heads: heads in the first axis.

    Returns:
      The same shape, within each head the even rows first, then the odd ones.
    """
    pairs = value.reshape(num_heads, -1, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def _rows_of(tensor: GgufTensor, rows: range | None) -> GgufTensor:
    """Those rows of a tensor as one of their own."""
    if rows is None:
        return tensor
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(len(rows), *tensor.shape[1:]),
        begin=tensor.begin + rows.start * row_bytes,
        num_bytes=len(rows) * row_bytes,
    )


def _expert_of(tensor: GgufTensor, index: int) -> GgufTensor:
    """One of a tensor's first axis as a tensor of its own."""
    part = _rows_of(tensor, range(index, index + 1))
    return replace(part, shape=tensor.shape[1:])


def _dequantised(tensor: GgufTensor, name: str) -> np.ndarray[Any, Any]:
    """float32 of the tensor's shape, bit for bit what the gguf package gives.

    Some rows at a time: dequantising takes several times the memory of what comes out.
    """
    num_rows, row_size = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    value = np.empty((num_rows, row_size), np.float32)
    if tensor.quantisation == GGMLQuantizationType.F64:
        value[:] = map_tensor(tensor.file, name, np.dtype(np.float64), value.shape, tensor.begin)
        return value.reshape(tensor.shape)
    data = _mapped(tensor, name)
    rows_at_once = max(1, _VALUES_AT_ONCE // row_size)
    try:
        for first in range(0, num_rows, rows_at_once):
            rows = slice(first, first + rows_at_once)
            value[rows] = dequantize(data[rows], tensor.quantisation)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{tensor.file}: tensor {name} is quantised as {tensor.quantisation.name}, which is not supported"
        ) from error
    return value.reshape(tensor.shape)


def _mapped(tensor: GgufTensor, name: str) -> np.ndarray[Any, Any]:
    """The tensor's bytes, uint8[rows, bytes of a row]; see `map_tensor`."""
    num_rows = math.prod(tensor.shape[:-1])
    shape = (num_rows, tensor.num_bytes // num_rows)
    return map_tensor(tensor.file, name, np.dtype(np.uint8), shape, tensor.begin)
