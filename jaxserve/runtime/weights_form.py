"""The form that weights have on devices: layers stacked for a scan, matrices packed for the processor, or as loaded."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.models import ModelConfig, pack_kernels, stack_layers
from pallas_kernels.common import native


def weights_form(config: EngineConfig, mesh: Mesh) -> str:
    """ "stacked", "packed" or "plain".

    Unless asked for, layers are not stacked on CPU, where a scan would copy each layer's weights; matrices are packed
    on one CPU device if numba is installed.

    Raises:
      ValueError: packed or quantised matrices are asked for where they cannot be.
      ImportError: they are asked for without numba.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    stacked = not on_cpu if config.scan_layers is None else config.scan_layers
    can_pack = on_cpu and mesh.size == 1 and not stacked and config.dtype in native.NATIVE_DTYPES
    if config.quantization is not None:
        if not can_pack or config.matmul_implementation == "xla":
            raise ValueError(
                f"quantization {config.quantization} needs one CPU device, unstacked layers, dtype"
                f" {' or '.join(native.NATIVE_DTYPES)} and matmul_implementation auto or native_cpu; leave it out for"
                " weights of dtype"
            )
        native.require()
        return "packed"
    if config.matmul_implementation == "native_cpu":
        native.require()
        if not can_pack:
            raise ValueError(
                "matmul_implementation native_cpu needs one CPU device, unstacked layers and dtype"
                f" {' or '.join(native.NATIVE_DTYPES)}; use xla"
            )
        return "packed"
    if stacked:
        return "stacked"
    return "packed" if config.matmul_implementation == "auto" and can_pack and native.is_available() else "plain"


def arrange_weights(params: Any, form: str, model_config: ModelConfig, mesh: Mesh, *, consume: bool = False) -> Any:
    """A tree as loaded, in `form`; it must not be used again itself.

    Args:
      consume: its arrays are deleted on the way; not for a tree of shapes.
    """
    if form == "stacked":
        return stack_layers(params, consume=consume)
    if form == "packed":
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: jax.device_put(leaf, replicated), pack_kernels(model_config, params))
    return params
