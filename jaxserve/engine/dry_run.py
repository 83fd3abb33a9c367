"""What an engine would plan that is not started: the model's configuration is read, its weights are not."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.engine.validation import context_length
from jaxserve.loading import ResolvedModel, abstract_weights, model_config_of, resolve_model
from jaxserve.models import ModelConfig, leaf_shardings, param_shardings
from jaxserve.runtime import (
    MemoryPlan,
    ModelRunner,
    abstract_adapters,
    arrange_weights,
    enable_compile_cache,
    keeps_packed,
    make_mesh,
    weight_dtype,
    weights_form,
)
from jaxserve.tables import num_programs


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What a start would do.

    Attributes:
      memory: its memory plan.
      decode_buckets, prefill_buckets, table_width_buckets: sizes of the steps to compile, as the flags have them.
      num_programs: to compile, or to load from the compilation cache.
    """

    memory: MemoryPlan
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    table_width_buckets: tuple[int, ...]
    num_programs: int

    def as_dict(self) -> dict[str, Any]:
        """Every number, by name; the memory plan's too."""
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "memory"}
        return self.memory.as_dict() | others

    def program_rows(self) -> list[tuple[str, str]]:
        """Label and value of each line that tells of programs."""
        return [
            ("decode rows (decode_buckets)", _listed(self.decode_buckets)),
            ("prefill tokens (prefill_buckets)", _listed(self.prefill_buckets)),
            ("table widths in pages (table_width_buckets)", _listed(self.table_width_buckets)),
            ("to compile", str(self.num_programs)),
        ]


def start_plan(config: EngineConfig) -> StartPlan:
    """What an engine of these settings would plan now; compiles its largest step, into the compilation cache.

    Raises:
      ValueError: settings that do not fit the model or the machine, memory included.
      CheckpointError, UnsupportedModelError: the model cannot be loaded.
    """
    enable_compile_cache(config.compile_cache)
    resolved = resolve_model(config.model)
    model_config = model_config_of(resolved)
    mesh = make_mesh(config.tensor_parallel_size, model_config)
    max_model_len = context_length(model_config.max_position_embeddings, config.max_model_len)
    params = _abstract_params(resolved, model_config, config, mesh)
    runner = ModelRunner(model_config, params, config, max_model_len, mesh)
    buckets = runner.buckets
    return StartPlan(
        runner.memory_plan,
        buckets.decode,
        buckets.prefill,
        buckets.widths,
        num_programs(buckets.all(), config.max_decode_steps),
    )


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _abstract_params(resolved: ResolvedModel, model_config: ModelConfig, config: EngineConfig, mesh: Mesh) -> Any:
    """The parameters' shapes, dtypes and shardings."""
    kept, packed = weight_dtype(config, mesh), keeps_packed(config, mesh)
    return abstract_params_on(
        mesh, model_config, config, abstract_weights(resolved, config.dtype, config.quantization, kept, packed=packed)
    )


def abstract_params_on(mesh: Mesh, model_config: ModelConfig, config: EngineConfig, loaded: Any) -> Any:
    """The parameters' shapes, dtypes and shardings as steps take them.

    Args:
      mesh: devices, which may be absent ones.
      loaded: what `abstract_weights` or `abstract_weights_of` gives.

    Raises:
      ValueError: these devices cannot have such weights.
    """
    form = weights_form(config, mesh, model_config, loaded)
    adapters = {"adapters": abstract_adapters(config, form, model_config, mesh)} if config.enable_lora else {}

    def shapes() -> Any:
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), loaded)
        return arrange_weights(params, form, model_config, mesh)

    if form.startswith("packed"):
        replicated = NamedSharding(mesh, PartitionSpec())
        of_packed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), jax.eval_shape(shapes)
        )
        return of_packed | adapters

    plain = jax.eval_shape(shapes)
    shardings = jax.tree.map(leaf_shardings, param_shardings(model_config, mesh, stacked=form == "stacked"), plain)
    return adapters | jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), plain, shardings
    )
