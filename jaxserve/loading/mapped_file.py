"""Tensors as views of their files: what is read is copied once, by whoever converts it."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core import CheckpointError


def map_tensor(file: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int) -> np.ndarray[Any, Any]:
    """A tensor of a file, mapped into memory by itself until its last view is gone; not writable.

    Copy what is to be kept: the file may change, and reading a view beyond the end of a file that has shrunk ends the
    process.

    Args:
      file: little-endian numbers without gaps.
      name: of the tensor, for messages.
      begin: its first byte in the file.

    Raises:
      CheckpointError: the file cannot be read, or ends inside the tensor.
    """
    count = math.prod(shape)
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            length = skipped + count * dtype.itemsize
            mapped = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ, offset=begin - skipped)
    except OSError as error:
        raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
    except ValueError as error:  # mmap's answer to a length beyond the end
        raise CheckpointError(f"{file} ends inside tensor {name}; the file is damaged or cut short") from error
    # Read ahead, and at once: faults of a page each would wait for the disk one by one.
    mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, dtype, count, skipped).reshape(shape)
