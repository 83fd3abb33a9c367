"""The LoRA adapters' part of the parameters, as the settings of an engine ask for it."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.models import ModelConfig, abstract_lora, empty_lora, lora_weights, stored_rank


def abstract_adapters(config: EngineConfig, form: str, model_config: ModelConfig, mesh: Mesh) -> Any:
    """Shapes with shardings of `params["adapters"]`.

    Args:
      form: of the weights, see `weights_form`.

    Raises:
      ValueError: adapters cannot change this model.
    """
    if not lora_weights(model_config):
        raise ValueError(f"enable_lora is set; no matrix of {model_config.architecture} can have an adapter")
    rank = stored_rank(config.max_lora_rank)
    return abstract_lora(model_config, config.dtype, mesh, form=form, max_loras=config.max_loras, rank=rank)


def empty_adapters(config: EngineConfig, form: str, model_config: ModelConfig, mesh: Mesh) -> Any:
    """`params["adapters"]` without any adapter, on `mesh`; as `abstract_adapters`."""
    shapes = abstract_adapters(config, form, model_config, mesh)
    return empty_lora(shapes, max_loras=config.max_loras, rank=stored_rank(config.max_lora_rank))
