"""Models: configuration, weight table, flax modules, rotary embedding, sharding rules."""

from jaxserve.models.attention import Attend, AttentionOptions
from jaxserve.models.batch import Batch
from jaxserve.models.config import ExpertsConfig, LatentConfig, LayerKind, ModelConfig, RopeConfig
from jaxserve.models.names import Names
from jaxserve.models.registry import SUPPORTED_ARCHITECTURES, model_config_from_hf
from jaxserve.models.sharding import param_shardings, partition_spec
from jaxserve.models.transformer import (
    RunLayers,
    abstract_params,
    forward,
    init_params,
    pack_kernels,
    stack_layers,
    unembed,
)
from jaxserve.models.weights import Weight, ignorable, make_params, weights

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Attend",
    "AttentionOptions",
    "Batch",
    "ExpertsConfig",
    "LatentConfig",
    "LayerKind",
    "ModelConfig",
    "Names",
    "RopeConfig",
    "RunLayers",
    "Weight",
    "abstract_params",
    "forward",
    "ignorable",
    "init_params",
    "make_params",
    "model_config_from_hf",
    "pack_kernels",
    "param_shardings",
    "partition_spec",
    "stack_layers",
    "unembed",
    "weights",
]
