"""Plan: everything that is said of a model on a slice, and its JSON form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.models import ModelConfig
from jaxserve.plan.compiled import Compiled, CompiledStep, DoesNotCompileError, compile_steps
from jaxserve.plan.notes import notes_on
from jaxserve.plan.sizing import Remedy, Sizing, engine_shapes, remedies, sizing_of
from jaxserve.plan.speed import Speed, SpeedEstimate, as_rows, batches
from jaxserve.plan.targets import Slice
from jaxserve.runtime import format_bytes
from jaxserve.sim.roofline import ModelShape


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model would take and give.

    Attributes:
      name: of the model.
      sizing: bytes, by arithmetic; of the step as compiled, where it was.
      compiled: None: it was not compiled.
      why_not_compiled: empty where it was.
      remedies: changes with which it fits; empty where it does.
      notes: what is worth knowing, in sentences.
      decode, prefill: speeds by batch and by tokens of a chunk.
      arithmetic: of the roofline, in lines.
    """

    name: str
    sizing: Sizing
    compiled: Compiled | None
    why_not_compiled: str
    remedies: list[Remedy]
    notes: list[str]
    decode: list[Speed]
    prefill: list[Speed]
    arithmetic: list[str]

    @property
    def fits(self) -> bool:
        """Whether weights, a step, slot state and one request of `max_model_len` do."""
        return not self.sizing.missing_bytes

    @property
    def why_not(self) -> str:
        """What is in the way, in words; empty where it fits."""
        sizing, shapes = self.sizing, self.sizing.shapes
        if self.fits:
            return ""
        allowed = format_bytes(sizing.allowed_bytes)
        if shapes.weights_bytes >= sizing.allowed_bytes:
            return f"weights alone take {format_bytes(shapes.weights_bytes)} of {allowed} on each device"
        longest = f"one request of {shapes.limits.max_model_len:,} tokens needs"
        needed = format_bytes(sizing.needed_pages * sizing.page_bytes)
        left = format_bytes(max(sizing.left_bytes, 0))
        return f"{longest} {needed} of KV pages on each device, and {left} of {allowed} are left for them"

    @property
    def max_concurrent_tokens(self) -> int:
        """Tokens whose K and V fit at once, where none of them is given back."""
        kv = self.sizing.shapes.kv
        return max(self.sizing.pages - 1, 0) // len(kv.groups.windows) * kv.page_size

    @property
    def max_concurrent_requests(self) -> int:
        """Requests of `max_model_len` that run at once: by pages, and by slots."""
        shapes = self.sizing.shapes
        by_pages = max(self.sizing.pages - 1, 0) // shapes.limits.most_pages_per_seq
        return min(by_pages, shapes.config.max_num_seqs)

    def as_dict(self) -> dict[str, Any]:
        """Every figure by name, JSON-able; docs/capacity.md tells what each is."""
        sizing, shapes = self.sizing, self.sizing.shapes
        where, config = sizing.where, shapes.config
        return {
            "model": self.name,
            "target": {
                "name": where.name,
                "chips": where.num_chips,
                "hosts": where.num_hosts,
                "topology": where.topology,
                "devices_used": config.tensor_parallel_size,
            },
            "settings": {name: getattr(config, name) for name in SETTINGS}
            | {"max_model_len": shapes.limits.max_model_len},
            "fits": self.fits,
            "why_not": self.why_not,
            "missing_bytes_per_device": sizing.missing_bytes,
            "remedies": [asdict(each) for each in self.remedies],
            "compiled": self.compiled is not None,
            "why_not_compiled": self.why_not_compiled,
            "memory_bytes_per_device": int(where.chip.memory_bytes),
            "allowed_bytes_per_device": sizing.allowed_bytes,
            "weights_bytes_per_device": shapes.weights_bytes,
            "activation_bytes_per_device": sizing.step_bytes,
            "activations_are": "compiled" if self.compiled else "estimated",
            "state_bytes_per_device": shapes.state_bytes,
            "kv_bytes_per_device": sizing.pages * sizing.page_bytes,
            "kv_bytes_per_token": sizing.kv_token_bytes,
            "kv_bytes_per_token_per_device": sizing.own_kv_token_bytes,
            "kv_pages": sizing.pages,
            "kv_pages_that_fit": sizing.fitting_pages,
            "page_size": config.page_size,
            "max_concurrent_tokens": self.max_concurrent_tokens,
            "max_concurrent_requests": self.max_concurrent_requests,
            "programs": [_program(each, config.tensor_parallel_size) for each in self.steps],
            "roofline": {
                "chip": asdict(where.chip),
                "interconnect": where.link.name,
                "interconnect_bytes_per_s": where.link_bandwidth(config.tensor_parallel_size),
                "decode": as_rows(self.decode),
                "prefill": as_rows(self.prefill),
                "arithmetic": self.arithmetic,
            },
            "notes": self.notes,
        }

    @property
    def steps(self) -> list[CompiledStep]:
        """The compiled programs."""
        return [self.compiled.decode, self.compiled.mixed] if self.compiled else []


SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "page_size",
    "memory_fraction",
    "tensor_parallel_size",
)
"""Settings of an engine that a plan takes; each is a flag."""


def make_plan(
    name: str,
    config_path: Path,
    model: ModelConfig,
    where: Slice,
    config: EngineConfig,
    *,
    compiles: bool = True,
    context: int = 1024,
    efficiency: dict[str, float] | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Plans a model on a slice.

    Args:
      name: of the model, to show.
      config_path: its config.json.
      config: the engine's settings; `tensor_parallel_size` is the number of devices.
      compiles: compile the largest steps for the slice.
      context: tokens of context of each decode row in the roofline; less where a request has less.
      efficiency: see `SpeedEstimate`.
      tell: see `compile_steps`.

    Raises:
      ValueError: settings that do not fit the model or the slice.
      ImportError: the slice's compiler is not installed.
    """
    if config.tensor_parallel_size > where.num_chips:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; {where.name} has {where.num_chips} devices"
        )
    sizing, compiled, why_not = sizing_of(where, model, config), None, "--nocompile"
    if compiles:
        mesh = where.compile_mesh(config.tensor_parallel_size, model)  # before anything else: it may be missing
        compiled, why_not = None, ""
        if sizing.shapes.weights_bytes >= sizing.allowed_bytes:
            why_not = "weights alone take more than the memory that is allowed"
        else:
            try:
                compiled = compile_steps(engine_shapes(model, config, mesh), max(sizing.pages, 2), tell)
            except DoesNotCompileError as error:
                why_not = f"the compiler found no room: {error}"
    if compiled is not None:
        sizing = replace(sizing, step_bytes=compiled.step_bytes)
    limits = sizing.shapes.limits
    estimate = SpeedEstimate(
        sizing,
        ModelShape.from_file(config_path),
        compiled.decode if compiled else None,
        compiled.mixed if compiled else None,
        efficiency or {},
    )
    context = min(context, limits.max_model_len)
    chunk = min(limits.prefill_chunk, limits.max_model_len)
    return Plan(
        name,
        sizing,
        compiled,
        why_not,
        remedies(sizing) if sizing.missing_bytes else [],
        notes_on(sizing),
        [estimate.decode(rows, context) for rows in batches(config.max_num_seqs, sizing.fitting_tokens // context)],
        [estimate.prefill(tokens) for tokens in sorted({max(1, chunk // 4), max(1, chunk // 2), chunk})],
        estimate.arithmetic(config.max_num_seqs, context, chunk),
    )


def _program(step: CompiledStep, num_devices: int) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(step).items() if name != "collectives"},
        "name": step.bucket.name,
        "argument_difference": step.difference,
        "sent_bytes_per_device": step.sent_bytes(num_devices),
        "collectives": [
            asdict(each) | {"sent_bytes_per_device": each.sent_bytes(num_devices)} for each in step.collectives
        ],
    }
