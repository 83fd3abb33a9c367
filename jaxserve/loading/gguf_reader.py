"""GGUF checkpoints: tensors under Hugging Face names, dequantised or as blocks, query and key rows in their order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.checkpoint import Part
from jaxserve.loading.gguf_blocks import unpack
from jaxserve.loading.gguf_config import ROPE_TENSORS, architecture, hf_config, hf_name, special_token_ids
from jaxserve.loading.gguf_file import GgufTensor, read_gguf
from jaxserve.loading.mapped_file import map_tensor
from jaxserve.models.weights import bounds_of
from pallas_kernels.matmul import Blocks

_VALUES_AT_ONCE = 1 << 20
_FLOATS = {
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
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

    def dtype(self, name: str) -> np.dtype[Any]:
        if self._architecture.norms_hold_one and name.endswith("norm.weight"):
            return np.dtype(np.float32)
        return _FLOATS.get(self._tensors[name].quantisation, np.dtype(np.float32))

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        tensor = self._tensors[name]
        rows, *others = (slice(*each) for each in bounds_of(tensor.shape, part))
        heads = self._interleaved_heads(name)
        # Interleaved rows are put in order within a head: heads that hold some of them are read whole; so are vectors.
        size = 1 if heads is None else self._head_size(name, heads)
        whole = slice(rows.start // size * size, -(-rows.stop // size) * size)
        if len(tensor.shape) == 1:
            whole = slice(0, tensor.shape[0])
        else:
            tensor = _rows_of(tensor, range(whole.start, whole.stop))
        value = _dequantised(tensor, name, tuple(others))
        if self._architecture.norms_hold_one and name.endswith("norm.weight"):
            value -= 1  # in float32, so a weight that was bfloat16 once comes back
        if heads is not None:
            value = unpermute(value, len(value) // size)
        return value[rows.start - whole.start : rows.stop - whole.start]

    def blocks(self, name: str, rows: range | None = None) -> Callable[[slice], Blocks]:
        """A function that gives the blocks of some of the rows of a tensor of a format that `gguf_blocks` knows."""
        tensor = _rows_of(self._tensors[name], rows)
        heads = self._interleaved_heads(name)
        data = _mapped(tensor, name) if heads is None else unpermute(_mapped(tensor, name), heads)
        return lambda part: unpack(data[part], tensor.quantisation)

    def _head_size(self, name: str, heads: int) -> int:
        rows = self._tensors[name].shape[0]
        if not 0 < heads <= rows or rows % heads:
            raise CheckpointError(f"{self.name}: tensor {name} has {rows} rows, which are no {heads} heads")
        return rows // heads

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads a tensor's rows are, if llama.cpp has them in another order; None: it has not."""
        if self._architecture.permuted and _QUERY in name:
            return int(self.hf_config["num_attention_heads"])
        if self._architecture.permuted and _KEY in name:
            return int(self.hf_config["num_key_value_heads"])
        return None


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


def _dequantised(tensor: GgufTensor, name: str, others: tuple[slice, ...] = ()) -> np.ndarray[Any, Any]:
    """float32 of the tensor's shape, bit for bit what the gguf package gives.

    Some rows at a time: dequantising takes several times the memory of what comes out.

    Args:
      others: what is wanted of each axis after the first; (): all.
    """
    num_rows, row_size = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    columns = others[-1] if others else slice(0, row_size)
    value = np.empty((num_rows, columns.stop - columns.start), np.float32)
    if tensor.quantisation == GGMLQuantizationType.F64:
        value[:] = map_tensor(tensor.file, name, np.dtype(np.float64), (num_rows, row_size), tensor.begin)[:, columns]
    else:
        data = _mapped(tensor, name)
        # Columns lie along blocks: those that hold some of them are dequantised whole.
        block, block_bytes = GGML_QUANT_SIZES[tensor.quantisation]
        first, end = columns.start // block, -(-columns.stop // block)
        data = data[:, first * block_bytes : end * block_bytes]
        own = slice(columns.start - first * block, columns.stop - first * block)
        rows_at_once = max(1, _VALUES_AT_ONCE // row_size)
        try:
            for row in range(0, num_rows, rows_at_once):
                rows = slice(row, row + rows_at_once)
                value[rows] = dequantize(data[rows], tensor.quantisation)[:, own]
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {name} is quantised as {tensor.quantisation.name}, which is not supported"
            ) from error
    value = value.reshape(*tensor.shape[:-1], -1)
    return value[(slice(None), *others[:-1])] if len(others) > 1 else value


def _mapped(tensor: GgufTensor, name: str) -> np.ndarray[Any, Any]:
    """The tensor's bytes, uint8[rows, bytes of a row]; see `map_tensor`."""
    num_rows = math.prod(tensor.shape[:-1])
    shape = (num_rows, tensor.num_bytes // num_rows)
    return map_tensor(tensor.file, name, np.dtype(np.uint8), shape, tensor.begin)
