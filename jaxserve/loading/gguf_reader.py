"""GGUF checkpoints: dequantised tensors under Hugging Face names, query and key rows in their order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.gguf_config import ROPE_TENSORS, architecture, hf_config, hf_name, special_token_ids
from jaxserve.loading.gguf_file import GgufTensor, read_gguf

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
        self._permuted = architecture(gguf).permuted
        factors = {
            name: _dequantised(gguf.tensors[name], name).ravel().tolist()
            for name in ROPE_TENSORS
            if name in gguf.tensors
        }
        self.hf_config: dict[str, Any] = hf_config(gguf, factors)
        self.generation_config: dict[str, Any] = special_token_ids(gguf.metadata)
        self._tensors = {hf_name(name): tensor for name, tensor in gguf.tensors.items() if name not in ROPE_TENSORS}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray[Any, Any]:
        value = _dequantised(self._tensors[name], name)
        if self._permuted and _QUERY in name:
            return unpermute(value, self.hf_config["num_attention_heads"])
        if self._permuted and _KEY in name:
            return unpermute(value, self.hf_config["num_key_value_heads"])
        return value


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


def _dequantised(tensor: GgufTensor, name: str) -> np.ndarray[Any, Any]:
    """float32 of the tensor's shape, bit for bit what the gguf package gives; the caller's to keep."""
    try:
        data = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.begin)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: tensor {name} cannot be read: {error}") from error
    if data.size != tensor.num_bytes:
        raise CheckpointError(f"{tensor.file} ends inside tensor {name}; the file is damaged or cut short")
    if tensor.quantisation == GGMLQuantizationType.F64:
        return data.view(np.float64).reshape(tensor.shape).astype(np.float32)
    rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
    try:
        value: np.ndarray[Any, Any] = dequantize(rows, tensor.quantisation)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{tensor.file}: tensor {name} is quantised as {tensor.quantisation.name}, which is not supported"
        ) from error
    return value.reshape(tensor.shape)
