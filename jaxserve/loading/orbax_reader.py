"""An Orbax checkpoint as tensors under Hugging Face names, read one by one: for converters.

Serving restores parameters with Orbax itself (`load_orbax`), straight onto devices.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jaxserve.core import CheckpointError
from jaxserve.loading.checkpoint import Part
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.orbax_checkpoint import check_shapes, read_metadata, saved_leaf
from jaxserve.loading.orbax_layout import PARAMS, first_line, name_of
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.weights import Weight, weights


class OrbaxReader:
    """A model directory that `save_orbax` or a converter wrote."""

    def __init__(self, path: Path) -> None:
        """Reads configuration and the list of arrays.

        Raises:
          CheckpointError: damaged, or the parameters do not fit config.json.
        """
        self.name = str(path)
        self.hf_config = read_json_object(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.is_file() else {}
        self._directory = path.absolute() / PARAMS
        table = weights(model_config_from_hf(self.hf_config))
        with ocp.StandardCheckpointer() as checkpointer:
            saved = read_metadata(checkpointer, self._directory)
        check_shapes(path, table, saved)
        self._dtypes = {weight.path: np.dtype(saved_leaf(saved, weight).dtype) for weight in table}
        self._sharers: dict[str, list[Weight]] = {}
        for weight in table:
            for name in weight.tensors:
                self._sharers.setdefault(name, []).append(weight)
        # Experts are asked for one by one, and a checkpoint may have a layer's in one chunk: it is kept meanwhile.
        largest = max((self._num_bytes(weight) for weight in table if weight.has_experts), default=0)
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2 * largest}})

    def names(self) -> list[str]:
        return list(self._sharers)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(map(max, zip(*(weight.tensor_shape for weight in self._sharers[name]), strict=True)))

    def dtype(self, name: str) -> np.dtype[Any]:
        found = {self._dtypes[weight.path] for weight in self._sharers[name]}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        value = np.empty(self.shape(name), self.dtype(name))
        for weight in self._sharers[name]:
            array = self._open(weight)
            if "{}" in weight.hf_name:
                array = array[weight.tensors.index(name)]
            try:
                weight.put(value, array.read().result())
            except ValueError as error:
                raise CheckpointError(
                    f"{self._directory}: {name_of(weight.path)} cannot be read: {first_line(error)}"
                ) from error
        return value[part]

    def _num_bytes(self, weight: Weight) -> int:
        return math.prod(weight.shape) * self._dtypes[weight.path].itemsize

    def _open(self, weight: Weight) -> Any:
        spec = {
            "driver": "zarr",
            "recheck_cached_data": False,
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{self._directory}/",
                "path": ".".join(map(str, weight.path)) + "/",
            },
        }
        try:
            return tensorstore.open(spec, context=self._context, open=True, read=True).result()
        except ValueError as error:
            raise CheckpointError(
                f"{self._directory}: {name_of(weight.path)} cannot be opened: {first_line(error)}"
            ) from error
