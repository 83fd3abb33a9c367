"""load_model: from a resolved model to parameters on the devices.

The model's weight table decides what is read. Names and shapes are compared first, from headers; then the part of
each tensor that a device holds is mapped, converted in one pass and placed on its own, a few ahead of the devices in
threads. So a host reads what its own devices keep and nothing else, whatever devices other hosts have, and holds a few
such parts besides, never a second copy of the model. A weight that is quantised here is read whole, some columns at a
time.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import CheckpointReader, check_tensors
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.quantised_weights import (
    Forms,
    abstract_params_of,
    bytes_of,
    description,
    quantised_array,
    quantised_forms,
    quantised_weight,
)
from jaxserve.loading.resolve import ResolvedModel
from jaxserve.loading.weight_dtypes import check_range, kept_dtypes
from jaxserve.models.config import ModelConfig
from jaxserve.models.leaf_sharding import leaf_shardings
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.sharding import param_shardings
from jaxserve.models.weights import Weight, bounds_of, ignorable, make_params, weights
from pallas_kernels.matmul import QuantisedMatrix

Progress = Callable[[int, int, str], None]
_READ_AHEAD = 4  # pieces of tensors
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
    weight_dtype: str | None = None,
    packed: bool = True,
) -> LoadedModel:
    """Reads a model's weights.

    Args:
      resolved: what to read, from `resolve_model`.
      dtype: "float32" or "bfloat16", of what `quantization` and `weight_dtype` leave.
      mesh: where to place the parameters; the default device when None.
      progress: called with bytes placed, bytes in all and the last weight's name.
      quantization: keeps matrices quantised: "gguf" (a file's blocks), or another of `EngineConfig`'s.
      weight_dtype: of matrices that are not quantised, see `kept_dtypes`; None: `dtype`.
      packed: quantised ones are for native products on one CPU device, see `runtime.weights_form`; else of any devices.

    Raises:
      CheckpointError: the checkpoint is damaged or does not fit its configuration.
      UnsupportedModelError: the model needs something this version lacks.
      ValueError: the checkpoint has nothing for `quantization`, or numbers that `weight_dtype` does not hold.
    """
    if resolved.kind == "orbax":
        return _load_orbax(resolved, dtype, mesh, progress or _silent, quantization, weight_dtype, packed)
    reader = open_checkpoint(resolved)
    config = config_of(reader.name, reader.hf_config)
    table = weights(config)
    _check(reader, config, table)
    forms = quantised_forms(quantization, config, table, reader, packed=packed)
    dtypes = kept_dtypes(weight_dtype, dtype, table, forms, reader)
    shardings = {} if mesh is None else _by_path(config, param_shardings(config, mesh))
    target = np.dtype(jnp.dtype(dtype))
    pieces = [
        piece
        for weight in table
        for piece in _pieces_of(weight, shardings.get(weight.path), forms, dtypes.get(weight.path, target))
    ]

    def read(piece: _Piece) -> Any:
        weight = piece.weight
        if weight.path in forms:
            assert quantization is not None
            return quantised_weight(weight, forms[weight.path], reader, quantization)
        own = np.dtype(np.float32) if weight.is_float32 else dtypes.get(weight.path, target)
        with np.errstate(over="ignore"):  # checked below
            value = weight.read(reader.read, own, piece.index)
        if weight_dtype == "float16":
            check_range(weight, value)
        return value

    total = sum(piece.num_bytes for piece in pieces)
    done = 0
    (progress or _silent)(done, total, "")
    placed: dict[tuple[str | int, ...], Any] = {}
    arrived: list[jax.Array] = []
    on_the_way: deque[Any] = deque()
    for piece, value in _read_ahead(pieces, read):
        weight = piece.weight
        sharding = shardings.get(weight.path)
        if sharding is None or weight.path in forms:
            copies = placed[weight.path] = _place_whole(value, sharding)
        else:
            copies = [jax.device_put(value, device) for device in piece.devices]
            arrived += copies
            if piece.is_last:
                placed[weight.path] = jax.make_array_from_single_device_arrays(weight.shape, sharding, arrived)
                arrived = []
        # Transfers are asynchronous and keep what they copy: on a busy machine it would add up to the model.
        on_the_way.append(copies)
        if len(on_the_way) >= _READ_AHEAD:
            jax.block_until_ready(on_the_way.popleft())
        done += piece.num_bytes
        (progress or _silent)(done, total, weight.hf_name)
    if quantization is not None:
        log.info("%s", description(forms, table))
    return LoadedModel(config, make_params(config, lambda weight: placed[weight.path]), reader.generation_config)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is read at once: what some devices hold of a weight.

    Attributes:
      index: its place in the weight; (): all.
      devices: of this process, that hold it.
      num_bytes: in memory, once.
      is_last: of the weight's pieces.
    """

    weight: Weight
    index: tuple[slice, ...]
    devices: tuple[jax.Device, ...]
    num_bytes: int
    is_last: bool


def _pieces_of(weight: Weight, sharding: Sharding | None, forms: Forms, dtype: np.dtype[Any]) -> list[_Piece]:
    """What this process' devices hold of a weight, each part once, however many hold it."""
    shapes = abstract_params_of(weight, forms, dtype)
    if sharding is None or weight.path in forms:
        return [_Piece(weight, (), (), bytes_of(shapes), True)]
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(weight.shape).items():
        devices.setdefault(tuple(bounds_of(weight.shape, index)), []).append(device)
    return [
        _Piece(
            weight,
            tuple(slice(*each) for each in bounds),
            tuple(holders),
            math.prod(end - first for first, end in bounds) * shapes.dtype.itemsize,
            number == len(devices),
        )
        for number, (bounds, holders) in enumerate(devices.items(), 1)
    ]


def model_config_of(resolved: ResolvedModel) -> ModelConfig:
    """A model's shape, without reading weights.

    Raises:
      CheckpointError: the files are missing or damaged.
      UnsupportedModelError: the model needs something this version lacks.
    """
    if resolved.kind == "orbax":
        return config_of(str(resolved.path), read_json_object(resolved.path / "config.json"))
    reader = open_checkpoint(resolved)
    return config_of(reader.name, reader.hf_config)


def abstract_weights(
    resolved: ResolvedModel,
    dtype: str,
    quantization: str | None = None,
    weight_dtype: str | None = None,
    *,
    packed: bool = True,
) -> dict[str, Any]:
    """Shapes and dtypes of what `load_model` would give, without reading weights.

    Raises:
      CheckpointError, UnsupportedModelError, ValueError: as `load_model`.
    """
    config = model_config_of(resolved)
    reader = None if resolved.kind == "orbax" else open_checkpoint(resolved)
    if reader is not None:
        _check(reader, config, weights(config))
    return abstract_weights_of(config, dtype, quantization, weight_dtype, packed=packed, reader=reader)


def abstract_weights_of(
    config: ModelConfig,
    dtype: str,
    quantization: str | None = None,
    weight_dtype: str | None = None,
    *,
    packed: bool = True,
    reader: CheckpointReader | None = None,
) -> dict[str, Any]:
    """As `abstract_weights`, of a model whose configuration alone is there.

    Args:
      reader: of its checkpoint, where there is one.

    Raises:
      ValueError: `quantization` needs a file.
    """
    table = weights(config)
    forms = quantised_forms(quantization, config, table, reader, packed=packed)
    dtypes, target = kept_dtypes(weight_dtype, dtype, table, forms, reader), jnp.dtype(dtype)
    return make_params(config, lambda weight: abstract_params_of(weight, forms, dtypes.get(weight.path, target)))


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


def _check(reader: CheckpointReader, config: ModelConfig, table: Sequence[Weight]) -> None:
    """Raises CheckpointError unless a checkpoint has a model's tensors."""
    check_tensors(reader, table, [name for name in reader.names() if ignorable(config, name)])


def config_of(name: str, hf_config: Mapping[str, Any]) -> ModelConfig:
    """As `model_config_from_hf`, naming the checkpoint where it is damaged.

    Raises:
      CheckpointError, UnsupportedModelError: as there.
    """
    try:
        return model_config_from_hf(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _load_orbax(
    resolved: ResolvedModel,
    dtype: str,
    mesh: Mesh | None,
    progress: Progress,
    quantization: str | None,
    weight_dtype: str | None,
    packed: bool,
) -> LoadedModel:
    from jaxserve.loading.orbax_checkpoint import load_orbax

    table = weights(model_config_of(resolved))
    forms = quantised_forms(quantization, model_config_of(resolved), table, None, packed=packed)
    dtypes = kept_dtypes(weight_dtype, dtype, table, forms, None)
    config, params, generation_config = load_orbax(resolved.path, dtype, mesh, progress)
    placed = _by_path(config, params)
    del params  # each array is let go as its smaller form is there
    shardings = {} if mesh is None else _by_path(config, param_shardings(config, mesh))
    for weight in table:
        if weight.path in forms:
            value = np.asarray(placed[weight.path]).astype(np.float32)
            matrix = quantised_array(weight, value, forms[weight.path])
            placed[weight.path] = _place_whole(matrix, shardings.get(weight.path))
        if weight.path in dtypes:
            placed[weight.path] = placed[weight.path].astype(dtypes[weight.path])
            check_range(weight, placed[weight.path])
    return LoadedModel(config, make_params(config, lambda weight: placed[weight.path]), generation_config)


def _read_ahead(pieces: Sequence[_Piece], read: Callable[[_Piece], Any]) -> Iterator[tuple[_Piece, Any]]:
    """Pieces in our layout, in their order, read a few ahead in threads."""
    pending: deque[tuple[_Piece, Future[Any]]] = deque()
    with ThreadPoolExecutor(min(_READ_AHEAD, os.cpu_count() or 1)) as pool:
        try:
            for piece in pieces:
                pending.append((piece, pool.submit(read, piece)))
                if len(pending) >= _READ_AHEAD:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _place_whole(value: Any, sharding: NamedSharding | None) -> Any:
    """A weight's arrays, read whole, on their devices; packed ones are on the default one."""
    if sharding is None or isinstance(value, QuantisedMatrix):
        return jax.tree.map(jnp.asarray, value)

    def place(leaf: np.ndarray[Any, Any], own: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, own, lambda index: leaf[index])

    return jax.tree.map(place, value, leaf_shardings(sharding, value))


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
