"""Writing an Orbax checkpoint of a model that is larger than memory, and the chunks it is stored in.

Orbax is given a tree whose leaves are made only when it writes them, one after the other. What it writes is what
`save_orbax` writes of arrays: `load_orbax` reads both alike.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxserve.core import JaxserveError
from jaxserve.loading.named_tensors import NamedTensor
from jaxserve.loading.orbax_layout import PARAMS, first_line
from jaxserve.loading.orbax_logs import silence_orbax
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import Weight, make_params

CHUNK_BYTES = 1 << 20
"""Most bytes of a chunk: the least that is read, so a device that holds a part reads little else."""


@dataclass(frozen=True, slots=True)
class _LazyArray:
    """A leaf of the tree: an array that is made when it is written."""

    tensor: NamedTensor
    written: Callable[[NamedTensor], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.num_bytes


class _LazyHandler(ocp.type_handlers.NumpyHandler):
    """Serialises lazy arrays one by one."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for commit in await super().serialize([value.tensor.read()], [info], [arg]):
                await asyncio.to_thread(commit.result)
            value.written(value.tensor)
        return []


def save_args(weight: Weight) -> ocp.SaveArgs:
    """Chunks of a weight: of one expert, and of a limited size."""
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if weight.has_experts else ())


def write_orbax_params(
    directory: Path,
    config: ModelConfig,
    tensor_of: Callable[[Weight], NamedTensor],
    written: Callable[[NamedTensor], None],
) -> None:
    """Writes the checkpoint folder of a model directory.

    Args:
      tensor_of: what is written of a weight, in the tree's layout.
      written: called after each.

    Raises:
      OSError: it cannot be written.
    """
    silence_orbax()
    registry = ocp.type_handlers.create_type_handler_registry(
        (_LazyArray, _LazyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax asks for it, whatever the leaves are
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    tree = make_params(config, lambda weight: _LazyArray(tensor_of(weight), written))
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(
                directory.absolute() / PARAMS,
                args=ocp.args.PyTreeSave(tree, save_args=make_params(config, save_args)),
            )
        except (OSError, JaxserveError):
            raise
        except Exception as error:  # Orbax and its storage raise many kinds for a full disk
            raise OSError(f"{type(error).__name__}: {first_line(error)}") from error
