"""The device side: mesh, KV pool, compiled steps, sampling."""

from jaxserve.runtime.compile_cache import enable_compile_cache
from jaxserve.runtime.compile_counter import COMPILES
from jaxserve.runtime.memory_plan import MemoryPlan
from jaxserve.runtime.mesh import make_mesh, scans_layers
from jaxserve.runtime.runner import ModelRunner, RowScores, StepHandle, StepOutput

__all__ = [
    "COMPILES",
    "MemoryPlan",
    "ModelRunner",
    "RowScores",
    "StepHandle",
    "StepOutput",
    "enable_compile_cache",
    "make_mesh",
    "scans_layers",
]
