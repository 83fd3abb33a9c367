"""float8 weights with a scale per block of a matrix (DeepSeek-V3, section 3.3.2): made wide again while reading.

A checkpoint's config says so in `quantization_config` (`quant_method` fp8, `weight_block_size`); the scales of
`NAME` are the tensor `NAME_scale_inv`, which the stored numbers are multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.core import CheckpointError

SCALE_SUFFIX = "_scale_inv"


def block_size_of(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, if the checkpoint of this config.json has such weights.

    Raises:
      CheckpointError: the size is none.
    """
    quantised = hf.get("quantization_config") or {}
    size = quantised.get("weight_block_size")
    if quantised.get("quant_method") != "fp8" or size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        raise CheckpointError(f"weight_block_size is {size!r}; fp8 weights have blocks of two positive integers")
    return size[0], size[1]


def widen(
    name: str,
    stored: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    block: tuple[int, int],
    first_row: int,
) -> np.ndarray[Any, Any]:
    """The numbers that some rows of a matrix stand for.

    Args:
      name: of the tensor, for messages.
      stored: float8[n, columns], rows from `first_row` on.
      scales: of the whole matrix.
      block: rows and columns of a block.

    Returns:
      float32[n, columns].

    Raises:
      CheckpointError: there are fewer scales than blocks.
    """
    rows = (first_row + np.arange(stored.shape[0])) // block[0]
    columns = np.arange(stored.shape[1]) // block[1]
    if scales.ndim != 2 or (rows[-1] >= scales.shape[0]) or scales.shape[1] != columns[-1] + 1:
        raise CheckpointError(
            f"tensor {name}{SCALE_SUFFIX} has shape {list(scales.shape)}; {name} has rows up to"
            f" {first_row + len(rows)} of {len(columns)} numbers in blocks of {block[0]} by {block[1]}"
        )
    wide = stored.astype(np.float32)
    # A row of blocks at a time: the scales of all numbers would be as large as the result.
    for index in range(rows[0], rows[-1] + 1):
        wide[rows == index] *= np.repeat(scales[index].astype(np.float32), block[1])[: len(columns)]
    return wide
