"""Tensors as views of their files: what is read is copied once, by whoever converts it."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import Part


def map_part(
    file: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int, part: Part
) -> np.ndarray[Any, Any]:
    """A part of a tensor, as `CheckpointReader.read` has it; of a file, mapped from its first row to its last.

    Args:
      shape, begin: of the whole tensor.
      Others as those of `map_tensor`.

    Raises:
      CheckpointError: as `map_tensor`.
    """
    leading = 0
    while leading < min(len(part), len(shape)) - 1 and part[leading].stop - part[leading].start == 1:
        leading += 1  # of one row of this axis, the next axis has rows in the same way
    mapped_shape = list(shape)
    for axis in range(min(leading + 1, len(part))):
        begin += part[axis].start * math.prod(shape[axis + 1 :]) * dtype.itemsize
        mapped_shape[axis] = part[axis].stop - part[axis].start
    rest = part[leading + 1 :]
    cuts_rows = any(each.stop - each.start < size for each, size in zip(rest, shape[leading + 1 :], strict=False))
    mapped = map_tensor(file, name, dtype, tuple(mapped_shape), begin, ahead=not cuts_rows)
    return mapped[(*[slice(None)] * (leading + 1), *rest)] if cuts_rows else mapped


def map_tensor(
    file: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int, *, ahead: bool = True
) -> np.ndarray[Any, Any]:
    """A tensor of a file, mapped into memory by itself until its last view is gone; not writable.

    Copy what is to be kept: the file may change, and reading a view beyond the end of a file that has shrunk ends the
    process.

    Args:
      file: little-endian numbers without gaps.
      name: of the tensor, for messages.
      begin: its first byte in the file.
      ahead: all of it is going to be read, and soon.

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
    if ahead:  # at once: faults of a page each would wait for the disk one by one
        mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, dtype, count, skipped).reshape(shape)
