"""load_model: from a resolved model to parameters on the devices.

The model's weight table decides what is read. Names and shapes are compared first, from headers; then each
tensor is mapped, converted in one pass and placed on its own, a few ahead of the device in threads. So the host holds
a few tensors besides what its own devices keep, never a second copy of the model.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.loading.checkpoint import CheckpointReader, check_tensors
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.quantised_weights import (
    abstract_params_of,
    bytes_of,
    description,
    quantised_array,
    quantised_forms,
    quantised_weight,
)
from jaxserve.loading.resolve import ResolvedModel
from jaxserve.models.config import ModelConfig
from jaxserve.models.leaf_sharding import leaf_shardings
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.sharding import param_shardings
from jaxserve.models.weights import Weight, ignorable, make_params, weights
from pallas_kernels.matmul import QuantisedMatrix

Progress = Callable[[int, int, str], None]
_READ_AHEAD = 4  # tensors
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its shape.
      params: parameter tree, layers as a list; placed by the sharding rules when a mesh was given. Weights that are
        kept quantised are `QuantisedMatrix` or `ScaledMatrix` of `pallas_kernels.matmul`.
      generation_config: the checkpoint's generation_config.json, {} without one.
    """

    config: ModelConfig
    params: dict[str, Any]
    generation_config: dict[str, Any]


def load_model(
    resolved: ResolvedModel,
    dtype: str,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    quantization: str | None = None,
    packed: bool = True,
) -> LoadedModel:
    """Reads a model's weights.

    Args:
      resolved: what to read, from `resolve_model`.
      dtype: "float32" or "bfloat16"; every weight is converted to it.
      mesh: where to place the parameters; the default device when None.
      progress: called with bytes placed, bytes in all and the last weight's name.
      quantization: keeps matrices quantised: "gguf" (a file's blocks), or another of `EngineConfig`'s.
      packed: those are for native products on one CPU device, see `runtime.weights_form`; else of any devices.

    Raises:
      CheckpointError: the checkpoint is damaged or does not fit its configuration.
      UnsupportedModelError: the model needs something this version lacks.
      ValueError: the checkpoint has nothing for `quantization`.
    """
    if resolved.kind == "orbax":
        return _load_orbax(resolved, dtype, mesh, progress or _silent, quantization, packed)
    reader = open_checkpoint(resolved)
    config = model_config_from_hf(reader.hf_config)
    table = weights(config)
    check_tensors(reader, table, [name for name in reader.names() if ignorable(config, name)])
    forms = quantised_forms(quantization, config, table, reader, packed=packed)
    shardings = {} if mesh is None else _by_path(config, param_shardings(config, mesh))
    placed: dict[tuple[str | int, ...], Any] = {}
    target = np.dtype(jnp.dtype(dtype))

    def read(weight: Weight) -> Any:
        if weight.path in forms:
            assert quantization is not None
            return quantised_weight(weight, forms[weight.path], reader, quantization)
        return weight.read(reader.read, np.dtype(np.float32) if weight.is_float32 else target)

    total = sum(bytes_of(abstract_params_of(weight, forms, target)) for weight in table)
    done = 0
    (progress or _silent)(done, total, "")
    for weight, value in _read_ahead(table, read):
        placed[weight.path] = _place_all(value, shardings.get(weight.path))
        done += bytes_of(value)
        (progress or _silent)(done, total, weight.hf_name)
    if quantization is not None:
        log.info("%s", description(forms, table))
    return LoadedModel(config, make_params(config, lambda weight: placed[weight.path]), reader.generation_config)


def model_config_of(resolved: ResolvedModel) -> ModelConfig:
    """A model's shape, without reading weights.

    Raises:
      CheckpointError: the files are missing or damaged.
      UnsupportedModelError: the model needs something this version lacks.
    """
    if resolved.kind == "orbax":
        return model_config_from_hf(read_json_object(resolved.path / "config.json"))
    return model_config_from_hf(open_checkpoint(resolved).hf_config)


def abstract_weights(
    resolved: ResolvedModel, dtype: str, quantization: str | None = None, *, packed: bool = True
) -> dict[str, Any]:
    """Shapes and dtypes of what `load_model` would give, without reading weights.

    Raises:
      CheckpointError, UnsupportedModelError, ValueError: as `load_model`.
    """
    config = model_config_of(resolved)
    reader = None if resolved.kind == "orbax" else open_checkpoint(resolved)
    forms = quantised_forms(quantization, config, weights(config), reader, packed=packed)
    return make_params(config, lambda weight: abstract_params_of(weight, forms, jnp.dtype(dtype)))


def open_checkpoint(resolved: ResolvedModel) -> CheckpointReader:
    """The reader of a safetensors directory or GGUF file.

    Raises:
      CheckpointError: the files are missing or damaged.
    """
    if resolved.kind == "gguf":
        from jaxserve.loading.gguf_reader import GgufReader

        return GgufReader(resolved.path)
    from jaxserve.loading.safetensors_reader import SafetensorsReader

    reader = SafetensorsReader(resolved.path)
    if isinstance(stored := reader.hf_config.get("quantization_config"), dict):
        from jaxserve.loading.block_fp8 import BlockFp8Reader, is_block_fp8
        from jaxserve.loading.mxfp4 import METHOD, Mxfp4Reader

        if stored.get("quant_method") == METHOD:
            return Mxfp4Reader(reader)
        if is_block_fp8(stored):
            return BlockFp8Reader(reader)
    return reader


def _load_orbax(
    resolved: ResolvedModel, dtype: str, mesh: Mesh | None, progress: Progress, quantization: str | None, packed: bool
) -> LoadedModel:
    from jaxserve.loading.orbax_checkpoint import load_orbax

    table = weights(model_config_of(resolved))
    forms = quantised_forms(quantization, model_config_of(resolved), table, None, packed=packed)
    config, params, generation_config = load_orbax(resolved.path, dtype, mesh, progress)
    placed = _by_path(config, params)
    shardings = {} if mesh is None else _by_path(config, param_shardings(config, mesh))
    for weight in table:
        if weight.path in forms:
            value = np.asarray(placed[weight.path]).astype(np.float32)
            matrix = quantised_array(weight, value, forms[weight.path])
            placed[weight.path] = _place_all(matrix, shardings.get(weight.path))
    return LoadedModel(config, make_params(config, lambda weight: placed[weight.path]), generation_config)


def _read_ahead(table: Sequence[Weight], read: Callable[[Weight], Any]) -> Iterator[tuple[Weight, Any]]:
    """Weights in our layout, in the table's order, read a few ahead in threads."""
    pending: deque[tuple[Weight, Future[Any]]] = deque()
    with ThreadPoolExecutor(min(_READ_AHEAD, os.cpu_count() or 1)) as pool:
        try:
            for weight in table:
                pending.append((weight, pool.submit(read, weight)))
                if len(pending) >= _READ_AHEAD:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _place(value: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _place_all(value: Any, sharding: NamedSharding | None) -> Any:
    """A weight's arrays on their devices; packed ones are on the default one."""
    if sharding is None or isinstance(value, QuantisedMatrix):
        return jax.tree.map(jnp.asarray, value)
    return jax.tree.map(_place, value, leaf_shardings(sharding, value))


def _by_path(config: ModelConfig, tree: dict[str, Any]) -> dict[tuple[str | int, ...], Any]:
    found = {}
    for weight in weights(config):
        node: Any = tree
        for key in weight.path:
            node = node[key]
        found[weight.path] = node
    return found


def _silent(done: int, total: int, what: str) -> None:
    pass
