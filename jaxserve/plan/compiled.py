"""The engine's own steps, compiled for a slice: what the compiler says of their memory and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.plan.collectives import Collective, collectives_of
from jaxserve.plan.sizing import planned_argument_bytes
from jaxserve.runtime import EngineShapes, ProgramTable
from jaxserve.tables import Bucket


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """One program, on one device.

    Attributes:
      bucket: its shape.
      num_pages: of the pool that it was compiled for.
      planned_argument_bytes: by arithmetic.
      argument_bytes, temp_bytes, output_bytes: by the compiler; outputs without those that take over an argument's
        memory.
      code_bytes: of the program itself.
      collectives: see `collectives_of`.
      compile_s: seconds to trace and compile it.
    """

    bucket: Bucket
    num_pages: int
    planned_argument_bytes: int
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    code_bytes: int
    collectives: list[Collective]
    compile_s: float

    @property
    def tokens(self) -> int:
        """Rows that go through the layers."""
        return self.bucket.decode_rows + self.bucket.prefill_tokens

    @property
    def difference(self) -> float:
        """Of the compiler's argument bytes from the planned ones, as a share of these."""
        return self.argument_bytes / self.planned_argument_bytes - 1.0

    def sent_bytes(self, num_devices: int) -> float:
        """Bytes that each device sends in a step in which no request asks for log-probabilities of its prompt."""
        return sum(each.sent_bytes(num_devices) for each in self.collectives if not each.conditional)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The largest steps of an engine.

    Attributes:
      decode, mixed: the largest step of decode rows alone, and the largest of all.
      step_bytes: what the largest step needs beside weights, pages and slot state; as the engine reckons it.
    """

    decode: CompiledStep
    mixed: CompiledStep
    step_bytes: int


class DoesNotCompileError(Exception):
    """The compiler found no room for a step in the device's memory."""


def compile_steps(shapes: EngineShapes, num_pages: int, tell: Callable[[str], None]) -> Compiled:
    """Compiles the largest steps for the devices of the shapes' mesh.

    Args:
      num_pages: of the pool.
      tell: is told what is compiled next.

    Raises:
      DoesNotCompileError: no room.
      JaxserveError: a step would copy the pool.
      ValueError: a kernel lacks something.
    """
    config = shapes.config
    programs = ProgramTable(
        shapes.kv,
        shapes.params,
        max_num_seqs=config.max_num_seqs,
        dtype=config.dtype,
        max_decode_steps=config.max_decode_steps,
    )
    largest = shapes.buckets.all()[-1]
    rows = Bucket(largest.decode_rows or config.max_num_seqs, 0, 0, largest.table_width)
    mesh = shapes.kv.mesh
    was_cached = jax.config.jax_enable_compilation_cache
    # A program for a device that is not there is not read back from the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        # Kernels ask the mesh for which kind of device they are traced.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            tell(f"step of {rows.decode_rows} decode rows")
            began = time.perf_counter()
            decode = programs.compile(rows, num_pages)
            decoded = time.perf_counter()
            tell(f"step of {largest.decode_rows} decode rows and {largest.prefill_tokens} prompt tokens")
            mixed = programs.compile(largest, num_pages)
            ended = time.perf_counter()
            tell("sampler")
            step_bytes = programs.workspace_of(mixed, largest, num_pages, shapes.limits.max_steps_ahead)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotCompileError(str(error).splitlines()[0][:300]) from error
    finally:
        jax.config.update("jax_enable_compilation_cache", was_cached)
    return Compiled(
        _measured(shapes, rows, num_pages, decode, decoded - began),
        _measured(shapes, largest, num_pages, mixed, ended - decoded),
        step_bytes,
    )


def _measured(shapes: EngineShapes, bucket: Bucket, num_pages: int, program: Any, seconds: float) -> CompiledStep:
    analysis = program.memory_analysis()
    return CompiledStep(
        bucket,
        num_pages,
        planned_argument_bytes(shapes, bucket, num_pages),
        int(analysis.argument_size_in_bytes),
        int(analysis.temp_size_in_bytes),
        int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        int(analysis.generated_code_size_in_bytes),
        collectives_of(program.as_text()),
        seconds,
    )
