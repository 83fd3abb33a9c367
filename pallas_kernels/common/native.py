"""Whether kernels that numba compiles for the processor can be used."""

from __future__ import annotations

import functools
import importlib.util
import platform

NATIVE_DTYPES = ("float32", "bfloat16")
"""What they compute with."""


def is_available() -> bool:
    """Whether numba, the extra `cpu`, is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def widens_float16() -> bool:
    """Whether they can be used, on a processor that makes float32 of float16."""
    if not is_available():
        return False
    from llvmlite.binding import get_host_cpu_features

    return platform.machine().lower() not in ("x86_64", "amd64") or bool(get_host_cpu_features().get("f16c"))


def require() -> None:
    """Raises ImportError, naming the extra, where numba is missing."""
    if not is_available():
        raise ImportError("native_cpu needs numba: pip install 'jaxserve[cpu]'")
