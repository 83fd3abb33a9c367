"""float8 checkpoints with a scale per block of a matrix (DeepSeek-V3, section 3.3.2), made wide as they are read.

The stored numbers of `NAME` are multiplied by the scales in `NAME_scale_inv`, float[rows / block rows, columns / block
columns] rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import Part
from jaxserve.loading.safetensors_reader import SafetensorsReader
from jaxserve.models.weights import bounds_of

METHOD = "fp8"
_SCALES = "_scale_inv"


def is_block_fp8(quantised: Mapping[str, Any]) -> bool:
    """Whether a config's `quantization_config` means this form."""
    return quantised.get("quant_method") == METHOD and quantised.get("weight_block_size") is not None


class BlockFp8Reader:
    """A directory whose `quantization_config` says fp8 in blocks; what has no scales is read as it is."""

    def __init__(self, stored: SafetensorsReader) -> None:
        """Checks shapes.

        Raises:
          CheckpointError: the block size is none, or scales do not fit their matrices.
        """
        self.name = stored.name
        self.hf_config: dict[str, Any] = {**stored.hf_config, "quantization_config": None}
        self.generation_config = stored.generation_config
        self._stored = stored
        size = stored.hf_config["quantization_config"]["weight_block_size"]
        if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
            raise CheckpointError(f"{self.name}: weight_block_size is {size!r}; it must be two positive integers")
        self._block = (size[0], size[1])
        names = set(stored.names())
        self._scaled = {name for name in names if name + _SCALES in names}
        for name in sorted(self._scaled):
            shape, scales = stored.shape(name), stored.shape(name + _SCALES)
            if len(shape) != 2 or scales != (-(-shape[0] // size[0]), -(-shape[1] // size[1])):
                raise CheckpointError(
                    f"{self.name}: {name} has shape {list(shape)} and {name + _SCALES} {list(scales)};"
                    f" there must be a scale per block of {size[0]} by {size[1]}"
                )

    def names(self) -> list[str]:
        return [name for name in self._stored.names() if name.removesuffix(_SCALES) not in self._scaled - {name}]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32) if name in self._scaled else self._stored.dtype(name)

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        stored = self._stored.read(name, part)
        if name not in self._scaled:
            return stored
        rows, columns = bounds_of(self.shape(name), part)
        height, width = self._block
        scales = self._stored.read(name + _SCALES).astype(np.float32)
        wide = stored.astype(np.float32)
        block_rows, block_columns = np.arange(*rows) // height, np.arange(*columns) // width
        # A row of blocks at a time: scales of all numbers would be as large as the result.
        for index in np.unique(block_rows):
            wide[block_rows == index] *= scales[index, block_columns]
        return wide
