"""Orbax checkpoints: parameters in this project's own layout, restored straight onto the devices.

A directory holds `config.json` (Hugging Face fields), optionally `generation_config.json` and tokenizer files, and
the Orbax checkpoint `params`. Every host reads only the shards it holds, so a model larger than one host's memory
loads. `params` is written last and appears whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.core import CheckpointError
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.orbax_layout import PARAMS, first_line, name_of
from jaxserve.loading.orbax_logs import silence_orbax
from jaxserve.loading.orbax_writer import save_args
from jaxserve.loading.tokenizer_files import copy_tokenizer
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.sharding import param_shardings
from jaxserve.models.weights import Weight, make_params, weights

Progress = Callable[[int, int, str], None]


def save_orbax(
    path: str | Path,
    hf_config: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_directory: str | Path | None = None,
) -> Path:
    """Writes a model directory that `resolve_model` knows.

    Args:
      path: directory; must not hold a checkpoint yet.
      hf_config: the model's config.json.
      params: parameter tree with layers as a list, in any dtype.
      generation_config: the model's generation_config.json.
      tokenizer_directory: where to copy tokenizer files from.

    Returns:
      `path` as a Path.

    Raises:
      ValueError: the directory holds a checkpoint already, or `params` does not fit `hf_config`.
    """
    directory = Path(path).absolute()
    config = model_config_from_hf(hf_config)
    _check_saved(config, params)
    if (directory / PARAMS).exists():
        raise ValueError(f"{directory / PARAMS} exists already; save to another directory or remove it first")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", hf_config)
    if generation_config is not None:
        _write_json(directory / "generation_config.json", generation_config)
    if tokenizer_directory is not None:
        copy_tokenizer(Path(tokenizer_directory), directory)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS, dict(params), save_args=make_params(config, save_args))
        checkpointer.wait_until_finished()
    return directory


def load_orbax(
    path: Path, dtype: str, mesh: Mesh | None, progress: Progress
) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
    """Restores what `save_orbax` wrote.

    Args:
      path: the model directory.
      dtype: of the restored parameters, whatever they were saved in.
      mesh: where to place them; the default device when None.
      progress: called with bytes placed, bytes in all and a text, before and after.

    Returns:
      Configuration, parameters with layers as a list, and the generation config.

    Raises:
      CheckpointError: damaged, or the parameters do not fit config.json.
    """
    config = model_config_from_hf(read_json_object(path / "config.json"))
    generation = path / "generation_config.json"
    generation_config = read_json_object(generation) if generation.is_file() else {}
    table = weights(config)
    total = sum(math.prod(weight.shape) for weight in table) * jnp.dtype(dtype).itemsize
    progress(0, total, "restoring the Orbax checkpoint")
    shardings = param_shardings(config, mesh) if mesh is not None else None
    default = SingleDeviceSharding(jax.devices()[0])

    def target(weight: Weight) -> jax.ShapeDtypeStruct:
        sharding = default if shardings is None else saved_leaf(shardings, weight)
        own = jnp.float32 if weight.is_float32 else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct(weight.shape, own, sharding=sharding)

    directory = path.absolute() / PARAMS
    silence_orbax()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = read_metadata(checkpointer, directory)
            check_shapes(path, table, saved)
            params = checkpointer.restore(directory, make_params(config, target))
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and its storage raise many kinds for a damaged checkpoint
            raise _unreadable(directory, error) from error
    progress(total, total, "restored the Orbax checkpoint")
    return config, params, generation_config


def read_metadata(checkpointer: ocp.StandardCheckpointer, directory: Path) -> Any:
    """The tree of arrays that a checkpoint folder lists: shape and dtype of each.

    Raises:
      CheckpointError: the list is missing or damaged.
    """
    try:
        saved = checkpointer.metadata(directory).item_metadata
    except Exception as error:  # as above
        raise _unreadable(directory, error) from error
    if saved is None:
        raise CheckpointError(f"{directory} cannot be restored: its list of arrays is missing or damaged")
    return saved


def _unreadable(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{directory} cannot be restored: {type(error).__name__}: {first_line(error)}")


def _check_saved(config: ModelConfig, params: Mapping[str, Any]) -> None:
    if not isinstance(params.get("layers"), list):
        raise ValueError("params['layers'] must be a list of layers; stacked layers cannot be saved")
    for weight in weights(config):
        try:
            shape = tuple(saved_leaf(params, weight).shape)
        except (KeyError, IndexError) as error:
            raise ValueError(f"params lacks {name_of(weight.path)}, which hf_config asks for") from error
        if shape != weight.shape:
            raise ValueError(
                f"params {name_of(weight.path)} has shape {list(shape)}; hf_config asks for {list(weight.shape)}"
            )


def check_shapes(path: Path, table: list[Weight], saved: Any) -> None:
    """Compares the arrays that a checkpoint lists with a model's weights.

    Raises:
      CheckpointError: one is missing or has another shape, or no floating dtype, or there are more.
    """
    for weight in table:
        try:
            leaf = saved_leaf(saved, weight)
            shape, dtype = tuple(leaf.shape), leaf.dtype
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} lacks {name_of(weight.path)}, which its config asks for") from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise CheckpointError(
                f"{path}: {name_of(weight.path)} has dtype {dtype}; weights must be floating-point numbers"
            )
        if shape != weight.shape:
            raise CheckpointError(
                f"{path}: {name_of(weight.path)} has shape {list(shape)}; its config asks for {list(weight.shape)}"
            )
    num_saved = len(jax.tree.leaves(saved, is_leaf=lambda leaf: hasattr(leaf, "shape")))
    if num_saved != len(table):
        raise CheckpointError(f"{path} holds {num_saved} parameters; the model of its config has {len(table)}")


def saved_leaf(tree: Any, weight: Weight) -> Any:
    """What a tree of parameters has of a weight.

    Raises:
      KeyError, IndexError, TypeError: nothing.
    """
    for key in weight.path:
        tree = tree[key]
    return tree


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), ensure_ascii=False, indent=1) + "\n", "utf-8")
