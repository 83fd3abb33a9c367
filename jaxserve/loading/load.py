"""load_model: from a resolved model to parameters on the devices.

The model's weight table decides what is read. Names and shapes are compared first, from headers; then each
tensor is mapped, converted in one pass and placed on its own, a few ahead of the device in threads. So the host holds
a few tensors besides what its own devices keep, never a second copy of the model.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxserve.loading.checkpoint import CheckpointReader, check_tensors
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.resolve import ResolvedModel
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.sharding import param_shardings
from jaxserve.models.weights import Weight, ignorable, make_params, weights

Progress = Callable[[int, int, str], None]
_READ_AHEAD = 4  # tensors


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its shape.
      params: parameter tree, layers as a list; placed by the sharding rules when a mesh was given.
      generation_config: the checkpoint's generation_config.json, {} without one.
    """

    config: ModelConfig
    params: dict[str, Any]
    generation_config: dict[str, Any]


def load_model(
    resolved: ResolvedModel, dtype: str, *, mesh: Mesh | None = None, progress: Progress | None = None
) -> LoadedModel:
    """Reads a model's weights.

    Args:
      resolved: what to read, from `resolve_model`.
      dtype: "float32" or "bfloat16"; every weight is converted to it.
      mesh: where to place the parameters; the default device when None.
      progress: called with bytes placed, bytes in all and the last weight's name.

    Raises:
      CheckpointError: the checkpoint is damaged or does not fit its configuration.
      UnsupportedModelError: the model needs something this version lacks.
    """
    if resolved.kind == "orbax":
        from jaxserve.loading.orbax_checkpoint import load_orbax

        config, params, generation_config = load_orbax(resolved.path, dtype, mesh, progress or _silent)
        return LoadedModel(config, params, generation_config)
    reader = open_checkpoint(resolved)
    config = model_config_from_hf(reader.hf_config)
    table = weights(config)
    check_tensors(reader, table, [name for name in reader.names() if ignorable(config, name)])
    shardings = {} if mesh is None else _by_path(config, param_shardings(config, mesh))
    placed: dict[tuple[str | int, ...], jax.Array] = {}
    target = np.dtype(jnp.dtype(dtype))
    total = sum(math.prod(weight.shape) for weight in table) * target.itemsize
    done = 0
    (progress or _silent)(done, total, "")
    for weight, value in _converted(reader, table, target):
        placed[weight.path] = _place(value, shardings.get(weight.path))
        done += value.nbytes
        (progress or _silent)(done, total, weight.hf_name)
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


def open_checkpoint(resolved: ResolvedModel) -> CheckpointReader:
    """The reader of a safetensors directory or GGUF file.

    Raises:
      CheckpointError: the files are missing or damaged.
    """
    if resolved.kind == "gguf":
        from jaxserve.loading.gguf_reader import GgufReader

        return GgufReader(resolved.path)
    from jaxserve.loading.safetensors_reader import SafetensorsReader

    return SafetensorsReader(resolved.path)


def _converted(
    reader: CheckpointReader, table: Sequence[Weight], dtype: np.dtype[Any]
) -> Iterator[tuple[Weight, np.ndarray[Any, Any]]]:
    """Weights in our layout and dtype, in the table's order, read a few ahead in threads."""

    def read(weight: Weight) -> np.ndarray[Any, Any]:
        value = reader.read(weight.hf_name)
        # Views of a file are copied even if nothing else is to be done; see `map_tensor`.
        is_own = value.flags.writeable
        return np.array(value.T if weight.transpose else value, dtype, order="C", copy=None if is_own else True)

    pending: deque[tuple[Weight, Future[np.ndarray[Any, Any]]]] = deque()
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


def _place(value: np.ndarray[Any, Any], sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


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
