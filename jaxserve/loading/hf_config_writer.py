"""The config.json that a converter writes: the source's in words that other programs know, and what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.loading.named_tensors import NamedTensor
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.rope import inverse_frequencies

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama from 3.1 on has; the factor differs."""
_READERS_OWN = ("expert_tensors", "latent_tensors")
_EMPTY_IF_ZERO = ("num_local_experts", "num_experts_per_tok")


def config_to_write(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model, without what only a reader's own fields say.

    Args:
      hf_config: as a reader gives it.
    """
    written = {key: value for key, value in hf_config.items() if key not in _READERS_OWN}
    if written.get("quantization_config", "") is None:
        del written["quantization_config"]
    for name in _EMPTY_IF_ZERO:
        if written.get(name, 1) == 0:
            del written[name]
    if written.get("num_nextn_predict_layers"):
        written["num_nextn_predict_layers"] = 0  # their tensors are not converted
    rope = written.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type") == "frequency_factors":
        written["rope_parameters"] = _as_llama3(model_config_from_hf(written), rope)
    return written


def with_dtype(hf_config: Mapping[str, Any], tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    """The config with the dtype that most matrices have."""
    dtypes = [tensor.dtype.name for tensor in tensors if len(tensor.shape) > 1]
    name = max(sorted(set(dtypes)), key=dtypes.count)
    keys = [key for key in ("dtype", "torch_dtype") if key in hf_config] or ["torch_dtype"]
    return {**hf_config, **dict.fromkeys(keys, name)}


def _as_llama3(config: ModelConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Frequency factors as the scaling that they were computed from, if it is Llama 3's; else as they are.

    Other programs do not know factors; GGUF has nothing else.
    """
    scaled = {
        "rope_type": "llama3",
        "rope_theta": rope["rope_theta"],
        "factor": float(np.max(config.rope.long_factors)),
        **_LLAMA3,
    }
    found = RopeConfig(
        "llama3",
        theta=config.rope.theta,
        factor=scaled["factor"],
        original_max_position=scaled["original_max_position_embeddings"],
        low_freq_factor=scaled["low_freq_factor"],
        high_freq_factor=scaled["high_freq_factor"],
        partial_rotary_factor=config.rope.partial_rotary_factor,
    )
    length = config.max_position_embeddings
    same = np.allclose(
        inverse_frequencies(found, config.rope_head_dim, length),
        inverse_frequencies(config.rope, config.rope_head_dim, length),
        rtol=1e-5,
        atol=0,
    )
    return scaled if same else dict(rope)
