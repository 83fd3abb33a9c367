"""Models: configuration, weight table, flax modules, rotary embedding, sharding rules."""

from jaxserve.models.adapted import LoraPair, LoraTokens
from jaxserve.models.attention import Attend, AttentionOptions
from jaxserve.models.batch import Batch
from jaxserve.models.config import ExpertsConfig, LatentConfig, LayerKind, ModelConfig, RopeConfig
from jaxserve.models.layer_groups import LayerGroups, group_layers, one_group
from jaxserve.models.leaf_sharding import leaf_shardings, leaf_specs, put_everywhere
from jaxserve.models.lora import (
    LORA_TARGETS,
    abstract_lora,
    empty_lora,
    lora_tree,
    lora_weights,
    place_lora,
    stored_rank,
    zero_lora,
)
from jaxserve.models.mesh_axes import COPIES, axis_size, kv_copies, model_axes
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
    "COPIES",
    "LORA_TARGETS",
    "SUPPORTED_ARCHITECTURES",
    "Attend",
    "AttentionOptions",
    "Batch",
    "ExpertsConfig",
    "LatentConfig",
    "LayerGroups",
    "LayerKind",
    "LoraPair",
    "LoraTokens",
    "ModelConfig",
    "Names",
    "RopeConfig",
    "RunLayers",
    "Weight",
    "abstract_lora",
    "abstract_params",
    "axis_size",
    "empty_lora",
    "forward",
    "group_layers",
    "ignorable",
    "init_params",
    "kv_copies",
    "leaf_shardings",
    "leaf_specs",
    "lora_tree",
    "lora_weights",
    "make_params",
    "model_axes",
    "model_config_from_hf",
    "one_group",
    "pack_kernels",
    "param_shardings",
    "partition_spec",
    "place_lora",
    "put_everywhere",
    "stack_layers",
    "stored_rank",
    "unembed",
    "weights",
    "zero_lora",
]
