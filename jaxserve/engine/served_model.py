"""ServedModel: a model in this process' part of the devices, and the runner over it, alone or with other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import block_until_ready
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.validation import context_length
from jaxserve.hosts import Followers, MirroredRunner, agree_on_given, agree_on_memory, agree_on_programs, given
from jaxserve.loading import ResolvedModel, abstract_weights, load_model, model_config_of
from jaxserve.loading.fingerprint import checkpoint_fingerprint
from jaxserve.models import ModelConfig
from jaxserve.runtime import (
    ModelRunner,
    arrange_weights,
    empty_adapters,
    keeps_packed,
    make_mesh,
    weight_dtype,
    weights_form,
)
from jaxserve.runtime.memory_plan import free_bytes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Weights on their devices.

    Attributes:
      config: the model's.
      params: in `form` (see `weights_form`), with places for LoRA adapters where they are on.
      mesh: all devices, those of other processes too.
      max_model_len: resolved context length.
    """

    config: ModelConfig
    params: Any
    form: str
    mesh: Mesh
    max_model_len: int

    def runner(self, config: EngineConfig, free: int | None = None) -> ModelRunner:
        """The runner of this process; `free` is what processes have agreed on, see `ModelRunner`."""
        return ModelRunner(self.config, self.params, config, self.max_model_len, self.mesh, free)

    @property
    def free_bytes(self) -> int:
        """Of each of this process' devices."""
        return free_bytes(self.params, self.mesh)


def load_served_model(
    config: EngineConfig, resolved: ResolvedModel, progress: Callable[[int, int, str], None]
) -> ServedModel:
    """Reads what this process' devices hold, and waits until it is there.

    Raises:
      ValueError: settings that do not fit the model or the machine.
      CheckpointError, UnsupportedModelError: the model cannot be loaded.
    """
    model_config = model_config_of(resolved)
    mesh = make_mesh(config.tensor_parallel_size, model_config)
    kept, packed = weight_dtype(config, mesh), keeps_packed(config, mesh)
    shapes = abstract_weights(resolved, config.dtype, config.quantization, kept, packed=packed)
    form = weights_form(config, mesh, model_config, shapes)
    loaded = load_model(
        resolved,
        config.dtype,
        mesh=mesh,
        progress=progress,
        quantization=config.quantization,
        weight_dtype=kept,
        packed=packed,
    )
    params = arrange_weights(loaded.params, form, loaded.config, mesh, consume=True)
    if config.enable_lora:
        params |= {"adapters": empty_adapters(config, form, loaded.config, mesh)}
    block_until_ready(params)
    max_model_len = context_length(loaded.config.max_position_embeddings, config.max_model_len)
    return ServedModel(loaded.config, params, form, mesh, max_model_len)


def agree(followers: Followers | None, config: EngineConfig, resolved: ResolvedModel) -> None:
    """Has the other processes, if there are any, agree on what all are given; before anything is loaded.

    Raises:
      ValueError, HostLostError: see `agree_on_given`.
    """
    if followers is not None:
        agree_on_given(followers, given(config, checkpoint_fingerprint(resolved)))


def make_runner(followers: Followers | None, config: EngineConfig, served: ServedModel) -> ModelRunner | MirroredRunner:
    """The engine's runner; with other processes one that they repeat.

    Raises:
      ValueError: what is asked for does not fit, or the processes do not agree.
      HostLostError: one is lost.
    """
    if followers is None:
        return served.runner(config)
    runner = served.runner(config, agree_on_memory(followers, served.free_bytes))
    agree_on_programs(followers, runner)
    return MirroredRunner(runner, followers)
