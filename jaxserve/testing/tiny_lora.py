"""Random LoRA adapters for the tiny model, in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.testing.tiny import layer_shapes

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_tiny_lora(
    path: str | Path,
    model: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    **overrides: Any,
) -> Path:
    """Writes an adapter large enough to change what the model says.

    Args:
      path: directory; made if missing.
      model: directory of the model, whose config.json tells shapes.
      seed: of the numbers.
      rank, alpha: of every pair, unless `rank_pattern` or `alpha_pattern` say otherwise.
      targets: modules.
      layers: their numbers; None: all.
      **overrides: entries of adapter_config.json.

    Returns:
      `path` as a Path.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        **overrides,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shapes = _shapes(json.loads((Path(model) / "config.json").read_text()))
    ranks = config.get("rank_pattern") or {}
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (out, rows) in shapes.items():
        number, target = int(name.split(".")[2]), name.rpartition(".")[2]
        if target not in targets or (layers is not None and number not in layers):
            continue
        own = next((value for key, value in ranks.items() if name.endswith(key)), rank)
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, rows**-0.5, (own, rows)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, own**-0.5, (out, own)).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of every matrix that can have an adapter."""
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in layer_shapes(config).items()
    }
