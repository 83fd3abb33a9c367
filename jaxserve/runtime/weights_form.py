"""The form that weights have on devices: layers stacked for a scan, matrices packed for the processor, or as loaded."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.models import ModelConfig, pack_kernels, stack_layers, weights
from jaxserve.runtime.huge_pages import use_huge_pages
from jaxserve.runtime.kv_pool import attention_implementation
from pallas_kernels.common import native
from pallas_kernels.matmul import QuantisedForm, QuantisedMatrix, can_pack, form_of

log = logging.getLogger(__name__)

STACK_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""What `decoder_stack` calls each `hidden_act`."""


_LEAST_CAPABILITY_OF_FP8 = (8, 9)
_IN_BLOCKS = ("gguf", "int8", "int4")
"""The values of `quantization` that native products take."""


def keeps_packed(config: EngineConfig, mesh: Mesh) -> bool:
    """Whether quantised matrices are kept for native products, not for XLA's."""
    return config.quantization is not None and _is_packed(config, mesh)


def weights_form(config: EngineConfig, mesh: Mesh, model_config: ModelConfig, loaded: Any = None) -> str:
    """How weights are kept.

    Args:
      loaded: what `abstract_weights` tells of the model; None: all weights are of `dtype`.

    Returns:
      "plain": as loaded; quantised matrices are `ScaledMatrix`, here and in "stacked".
      "stacked": stacked over layers, for one compiled layer body. The default on accelerators; on CPU a scan would copy
        each layer's weights.
      "packed": matrices packed, for products by `pallas_kernels.matmul`.
      "packed_stack": packed and stacked, for all layers in one call by `pallas_kernels.decoder_stack`. The default on
        one CPU device with numba, where the model can have it; else "packed".

    Raises:
      ValueError: an implementation or quantised matrices are asked for where they cannot be.
      ImportError: an implementation needs numba, which is missing.
    """
    stacked, can_be_native = _is_stacked(config, mesh), _can_be_native(config, mesh)
    if config.quantization is not None:
        _check_quantization(config, mesh, model_config, loaded)
    asked = [
        name
        for name in ("matmul_implementation", "decoder_implementation")
        if getattr(config, name) == "native_cpu" and (native.require() or not can_be_native)
    ]
    if asked:
        raise ValueError(
            f"{asked[0]} native_cpu needs one CPU device, unstacked layers and dtype"
            f" {' or '.join(native.NATIVE_DTYPES)}; use xla"
        )
    if stacked:
        return "stacked" if config.quantization is None or _layers_are_alike(config, model_config, loaded) else "plain"
    if not _is_packed(config, mesh):
        if config.decoder_implementation == "native_cpu":
            raise ValueError("decoder_implementation native_cpu needs packed weights, not matmul_implementation xla")
        return "plain"
    if config.decoder_implementation == "xla":
        return "packed"
    reason = _why_no_stack(config, model_config, loaded)
    if reason and config.decoder_implementation == "native_cpu":
        raise ValueError(f"decoder_implementation native_cpu: {reason}; use xla")
    if reason:
        log.info("decoder layers are run one by one: %s", reason)
    return "packed" if reason else "packed_stack"


def weight_dtype(config: EngineConfig, mesh: Mesh) -> str:
    """As what matrices that are not quantised are loaded, see `load_model`: "auto" only where they are packed."""
    return config.dtype if config.weight_dtype == "auto" and not _is_packed(config, mesh) else config.weight_dtype


def _is_packed(config: EngineConfig, mesh: Mesh) -> bool:
    """Whether products are the native ones."""
    return (
        config.matmul_implementation != "xla"
        and config.quantization in (None, *_IN_BLOCKS)
        and _can_be_native(config, mesh)
        and native.is_available()
    )


def _is_stacked(config: EngineConfig, mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform != "cpu" if config.scan_layers is None else config.scan_layers


def _can_be_native(config: EngineConfig, mesh: Mesh) -> bool:
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and mesh.size == 1 and not _is_stacked(config, mesh) and config.dtype in native.NATIVE_DTYPES


def _check_quantization(config: EngineConfig, mesh: Mesh, model_config: ModelConfig, loaded: Any) -> None:
    """Raises ValueError if these devices or products cannot have weights so quantised."""
    name, device = config.quantization, mesh.devices.flat[0]
    if name not in _IN_BLOCKS:
        for setting in ("matmul_implementation", "decoder_implementation"):
            if getattr(config, setting) == "native_cpu":
                kinds = ", ".join(_IN_BLOCKS)
                raise ValueError(f"quantization {name} has no native products: use {setting} auto or xla, or {kinds}")
    experts, size = model_config.experts, mesh.size
    in_parts = experts is not None and name in _IN_BLOCKS and experts.split(size) == "expert_mlp"
    if in_parts and experts.inner_size % 32 == 0 and experts.inner_size % (32 * size):
        raise ValueError(
            f"quantization {name}: {size} devices share the experts' inner width of {experts.inner_size}, which is not"
            " in blocks of 32 for each: use int8_channel or fp8"
        )
    if device.platform != "gpu":
        return
    capability = tuple(map(int, device.compute_capability.split(".")))
    if name == "fp8" and capability < _LEAST_CAPABILITY_OF_FP8:
        raise ValueError(
            f"quantization fp8 needs a GPU of compute capability {'.'.join(map(str, _LEAST_CAPABILITY_OF_FP8))};"
            f" this one has {device.compute_capability}: use int8_channel"
        )
    if any(jnp.dtype(leaf.dtype).name in ("int4", "uint4") for leaf in jax.tree.leaves(loaded)):
        raise ValueError(
            f"quantization {name} keeps numbers of 4 bits, which XLA copies to another order in every step on a GPU, so"
            " that more memory is taken than saved: use int8_channel, fp8 or int8"
        )


def _layers_are_alike(config: EngineConfig, model_config: ModelConfig, loaded: Any) -> bool:
    """Whether all layers with one kind of MLP have one form, as stacking needs.

    Raises:
      ValueError: they have not, and stacked layers are asked for.
    """
    forms: dict[str, Any] = {}
    for index, (kind, layer) in enumerate(zip(model_config.mlp_kinds, loaded["layers"], strict=True)):
        form = jax.tree.structure(layer), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(layer)]
        if forms.setdefault(kind, form) != form:
            reason = f"the matrices of layer {index} have other forms than those of the layers before"
            if config.scan_layers:
                raise ValueError(f"scan_layers: {reason} (quantization {config.quantization}); leave scan_layers out")
            log.info("layers are not stacked: %s", reason)
            return False
    return True


def _why_no_stack(config: EngineConfig, model_config: ModelConfig, loaded: Any) -> str | None:
    """Why the layers cannot be one call; None: they can."""
    if config.enable_lora:
        return "LoRA adapters (enable_lora) are added to the products of single layers"
    pool_dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    attention = attention_implementation(config, model_config, "cpu")
    if attention != "native_cpu":
        return f"attention is by {attention}, which is another kernel"
    if pool_dtype not in native.NATIVE_DTYPES:
        return f"KV pages of {pool_dtype} are not supported, {' and '.join(native.NATIVE_DTYPES)} are"
    if model_config.hidden_act not in STACK_ACTIVATIONS:
        return f"activation {model_config.hidden_act} is not supported, {', '.join(STACK_ACTIVATIONS)} are"
    if missing := _missing_in_stack(model_config):
        return f"{missing} is not supported in one call"
    kept: set[str | QuantisedForm] = {config.dtype}
    if loaded is not None:
        leaves = jax.tree.leaves(loaded["layers"], is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        matrices = [leaf for leaf in leaves if len(leaf.shape) > 1]
        kept = {form_of(leaf) if isinstance(leaf, QuantisedMatrix) else jnp.dtype(leaf.dtype).name for leaf in matrices}
    if len(kept) > 1:
        names = sorted(each if isinstance(each, str) else each.name for each in kept)
        return f"the layers' matrices have several forms, {', '.join(names)}; all must have one"
    form = kept.pop()
    if isinstance(form, str):
        for weight in weights(model_config):
            if weight.is_matrix and weight.path[0] == "layers" and not can_pack(weight.shape, jnp.dtype(form)):
                return f"{weight.hf_name} is {list(weight.shape)}, which has no packed form"
        return None
    columns = model_config.num_heads // model_config.num_kv_heads * model_config.head_dim
    if form.has_minimum and columns % form.block:
        return f"{columns} query columns of a KV head are not in blocks of {form.block}"
    return None


def _missing_in_stack(config: ModelConfig) -> str | None:
    """The first thing that a model's layers have and `decoder_stack` lacks."""
    has = {
        f"norm_kind {config.norm_kind}": config.norm_kind != "rms",
        f"norm_placement {config.norm_placement}": config.norm_placement != "pre",
        "norm_offset": config.norm_offset,
        f"qk_norm {config.qk_norm}": config.qk_norm is not None,
        "rope_interleaved": config.rope_interleaved,
        "latent attention": config.latent is not None,
        f"attention_scale {config.attention_scale}": config.score_scale != config.head_dim**-0.5,
        "attention_softcap": config.attention_softcap is not None,
        f"residual_multiplier {config.residual_multiplier}": config.residual_multiplier != 1.0,
        "more than one rope": len(set(config.layer_ropes)) > 1 or config.layer_ropes[0] != 0,
        "attention_sinks": config.attention_sinks,
        "a mixture of experts": "experts" in config.mlp_kinds,
        "an MLP without a gate": "plain" in config.mlp_kinds,
    }
    return next((name for name, present in has.items() if present), None)


def arrange_weights(params: Any, form: str, model_config: ModelConfig, mesh: Mesh, *, consume: bool = False) -> Any:
    """A tree as loaded, in `form`; it must not be used again itself.

    Args:
      consume: its arrays are deleted on the way; not for a tree of shapes.
    """
    if form in ("packed", "packed_stack"):
        replicated = NamedSharding(mesh, PartitionSpec())
        params = pack_kernels(model_config, params)
        if form == "packed_stack":
            params = stack_layers(params, consume=consume)
        params = jax.tree.map(lambda leaf: jax.device_put(leaf, replicated), params)
        if consume:  # arrays, not shapes
            use_huge_pages(params)
        return params
    return stack_layers(params, consume=consume) if form == "stacked" else params
