"""Writing lines so that a file ends with a whole one, on a full disk too."""

from __future__ import annotations

import contextlib
import os


def write_whole(fd: int, line: bytes, size: int) -> int:
    """Writes `line` behind the `size` bytes that a file has; of one that fails no part stays.

    A pipe or a device cannot take back what it was given.

    Returns:
      The new size, in bytes.

    Raises:
      OSError: it is not there.
    """
    left = memoryview(line)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise
    return size + len(line)
