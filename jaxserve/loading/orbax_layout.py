"""How an Orbax model directory looks: config.json beside the checkpoint folder `params`. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PARAMS = "params"
_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")


def name_of(path: Sequence[str | int]) -> str:
    """What a weight at a path of the tree is called in the checkpoint."""
    return "/".join(map(str, path))


def first_line(error: Exception) -> str:
    """Of the message: Orbax and its storage go on for pages."""
    return str(error).strip().partition("\n")[0]


def is_orbax_directory(path: Path) -> bool:
    """Whether `path` was written by `save_orbax`."""
    return any((path / PARAMS / mark).exists() for mark in _MARKS)
