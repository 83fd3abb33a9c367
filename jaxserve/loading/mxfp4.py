"""MXFP4 checkpoints of gpt-oss: experts in blocks of 32 four-bit floats with one scale, dequantised as they are read.

A matrix `[E, out, in]` lies in `NAME_blocks` uint8[E, out, in / 32, 16], two values a byte, the first in the low half,
and `NAME_scales` uint8[E, out, in / 32], exponents of 2 with 127 added (OCP Microscaling Formats 1.0). It is offered as
`NAME`, [E, in, out], as unquantised checkpoints have it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import Part
from jaxserve.loading.safetensors_reader import SafetensorsReader
from jaxserve.models.weights import bounds_of

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Mxfp4Reader:
    """A directory whose `quantization_config` says mxfp4; what has no blocks is read as it is."""

    def __init__(self, stored: SafetensorsReader) -> None:
        """Checks shapes.

        Raises:
          CheckpointError: blocks without scales, or scales of other shapes.
        """
        self.name = stored.name
        self.hf_config: dict[str, Any] = {**stored.hf_config, "quantization_config": None}
        self.generation_config = stored.generation_config
        self._stored = stored
        names = stored.names()
        self._packed = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
        for name in sorted(self._packed):
            if name + _SCALES not in names:
                raise CheckpointError(f"{self.name} lacks tensor {name + _SCALES}, which {name + _BLOCKS} needs")
            blocks, scales = stored.shape(name + _BLOCKS), stored.shape(name + _SCALES)
            if len(blocks) != 4 or blocks[-1] != _BLOCK // 2 or scales != blocks[:-1]:
                raise CheckpointError(
                    f"{self.name}: {name + _BLOCKS} has shape {list(blocks)} and {name + _SCALES} {list(scales)};"
                    f" MXFP4 needs [experts, out, in / {_BLOCK}, {_BLOCK // 2}] and the same without the last"
                )

    def names(self) -> list[str]:
        parts = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        return [name for name in self._stored.names() if name not in parts] + sorted(self._packed)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._stored.shape(name)
        experts, out, blocks, _ = self._stored.shape(name + _BLOCKS)
        return (experts, blocks * _BLOCK, out)

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32) if name in self._packed else self._stored.dtype(name)

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        if name not in self._packed:
            return self._stored.read(name, part)
        experts, rows, columns = (slice(*each) for each in bounds_of(self.shape(name), part))
        # Rows lie along blocks: those that hold some of them are read whole.
        blocks = slice(rows.start // _BLOCK, -(-rows.stop // _BLOCK))
        stored = (experts, columns, blocks)
        values = dequantise(
            self._stored.read_bytes(name + _BLOCKS, stored), self._stored.read_bytes(name + _SCALES, stored)
        ).swapaxes(-1, -2)
        first = blocks.start * _BLOCK
        return values[:, rows.start - first : rows.stop - first]


def dequantise(blocks: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32[..., in] of uint8[..., in / 32, 16] and uint8[..., in / 32]; exact."""
    values = np.empty((*blocks.shape, 2), np.float32)
    values[..., 0] = _VALUES[blocks & 15]
    values[..., 1] = _VALUES[blocks >> 4]
    values = values.reshape(*blocks.shape[:-1], _BLOCK)
    np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS, out=values)
    return values.reshape(*blocks.shape[:-2], math.prod(values.shape[-2:]))
