"""How an Orbax model directory looks: config.json beside the checkpoint folder `params`. No jax."""

from __future__ import annotations

from pathlib import Path

PARAMS = "params"
_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")


def is_orbax_directory(path: Path) -> bool:
    """Whether `path` was written by `save_orbax`."""
    return any((path / PARAMS / mark).exists() for mark in _MARKS)
