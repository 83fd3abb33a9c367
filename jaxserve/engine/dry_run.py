"""The memory plan of an engine that is not started: the model's configuration is read, its weights are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.engine.validation import context_length
from jaxserve.loading import model_config_of, resolve_model
from jaxserve.models import ModelConfig, make_params, param_shardings
from jaxserve.runtime import MemoryPlan, ModelRunner, arrange_weights, enable_compile_cache, make_mesh, weights_form


def memory_plan_of(config: EngineConfig) -> MemoryPlan:
    """What an engine of these settings would plan now; compiles its largest step, into the compilation cache.

    Raises:
      ValueError: settings that do not fit the model or the machine, memory included.
      CheckpointError, UnsupportedModelError: the model cannot be loaded.
    """
    enable_compile_cache(config.compile_cache)
    model_config = model_config_of(resolve_model(config.model))
    mesh = make_mesh(config.tensor_parallel_size)
    max_model_len = context_length(model_config.max_position_embeddings, config.max_model_len)
    params = _abstract_params(model_config, config, mesh)
    return ModelRunner(model_config, params, config, max_model_len, mesh).memory_plan


def _abstract_params(model_config: ModelConfig, config: EngineConfig, mesh: Mesh) -> Any:
    """The parameters' shapes, dtypes and shardings."""
    form = weights_form(config, mesh)

    def shapes() -> Any:
        params = make_params(model_config, lambda weight: jnp.zeros(weight.shape, config.dtype))
        return arrange_weights(params, form, model_config, mesh)

    if form == "packed":
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), jax.eval_shape(shapes)
        )

    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(shapes),
        param_shardings(model_config, mesh, stacked=form == "stacked"),
    )
