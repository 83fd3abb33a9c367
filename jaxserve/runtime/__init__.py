"""The device side: mesh, KV pool, compiled steps, sampling."""

from jaxserve.runtime.adapter_weights import abstract_adapters, empty_adapters
from jaxserve.runtime.compile_cache import enable_compile_cache
from jaxserve.runtime.compile_counter import COMPILES
from jaxserve.runtime.device_errors import is_out_of_memory
from jaxserve.runtime.engine_shapes import EngineShapes
from jaxserve.runtime.memory_plan import MemoryPlan, format_bytes
from jaxserve.runtime.mesh import make_mesh, mesh_of
from jaxserve.runtime.page_transfers import PageBlock, PageSink, PageSource
from jaxserve.runtime.programs import ProgramTable
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.step_handles import PreparedStep, RowScores, StepHandle, StepOutput
from jaxserve.runtime.weights_form import arrange_weights, keeps_packed, weight_dtype, weights_form

__all__ = [
    "COMPILES",
    "EngineShapes",
    "MemoryPlan",
    "ModelRunner",
    "PageBlock",
    "PageSink",
    "PageSource",
    "PreparedStep",
    "ProgramTable",
    "RowScores",
    "StepHandle",
    "StepOutput",
    "abstract_adapters",
    "arrange_weights",
    "empty_adapters",
    "enable_compile_cache",
    "format_bytes",
    "is_out_of_memory",
    "keeps_packed",
    "make_mesh",
    "mesh_of",
    "weight_dtype",
    "weights_form",
]
