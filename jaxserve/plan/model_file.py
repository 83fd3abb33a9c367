"""The model of a plan: a published configuration by name, or a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.core import CheckpointError
from jaxserve.loading.block_fp8 import is_block_fp8
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.load import config_of
from jaxserve.loading.mxfp4 import METHOD
from jaxserve.models import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
"""In a source checkout; an installed package has none."""


def find_config(name: str) -> Path:
    """The config.json of a name: a file, a directory that holds one, or one of `configs/models` without its ending.

    Raises:
      ValueError: nothing is there, naming what is.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    named = CONFIGS / f"{name}.json"
    if named.is_file() and named.parent == CONFIGS:
        return named
    known = ", ".join(sorted(each.stem for each in CONFIGS.glob("*.json")))
    names = f"one of {known}" if known else "no name, as configs/models of a source checkout is not there"
    raise ValueError(f"model_config is {name!r}; it must be a config.json, a directory that holds one, or {names}")


def read_model(path: Path) -> ModelConfig:
    """The model of a config.json.

    Raises:
      CheckpointError, UnsupportedModelError: it is not one that the engine can load.
    """
    hf: Mapping[str, Any] = read_json_object(path)
    stored = hf.get("quantization_config")
    if isinstance(stored, dict) and (stored.get("quant_method") == METHOD or is_block_fp8(stored)):
        hf = {**hf, "quantization_config": None}  # loading makes plain numbers of them
    if not hf:
        raise CheckpointError(f"{path} is empty")
    return config_of(str(path), hf)
