"""jaxserve: an LLM serving runtime on JAX/XLA.

Public names load on first use, so that `import jaxserve.scheduler` brings no jax with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.core import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs
    from jaxserve.engine import LLM, AsyncEngine

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxserve.engine",
    "AsyncEngine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "SamplingParams": "jaxserve.core",
    "StructuredOutputs": "jaxserve.core",
    "RequestOutput": "jaxserve.core",
    "CompletionOutput": "jaxserve.core",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
