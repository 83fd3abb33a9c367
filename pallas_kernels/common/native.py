"""Whether kernels that numba compiles for the processor can be used."""

from __future__ import annotations

import importlib.util

NATIVE_DTYPES = ("float32", "bfloat16")
"""What they compute with."""


def is_available() -> bool:
    """Whether numba, the extra `cpu`, is installed."""
    return importlib.util.find_spec("numba") is not None


def require() -> None:
    """Raises ImportError, naming the extra, where numba is missing."""
    if not is_available():
        raise ImportError("native_cpu needs numba: pip install 'jaxserve[cpu]'")
