"""Models from disk: finding them, reading safetensors, GGUF and Orbax, placing parameters.

`resolve_model` needs no jax; what does is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from jaxserve.loading.resolve import DEMO_MODEL, ResolvedModel, resolve_model

if TYPE_CHECKING:
    from jaxserve.loading.load import LoadedModel, abstract_weights, abstract_weights_of, load_model, model_config_of
    from jaxserve.loading.orbax_checkpoint import save_orbax

__all__ = [
    "DEMO_MODEL",
    "LoadedModel",
    "ResolvedModel",
    "abstract_weights",
    "abstract_weights_of",
    "load_model",
    "model_config_of",
    "resolve_model",
    "save_orbax",
]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "abstract_weights", "abstract_weights_of", "load_model", "model_config_of"):
        from jaxserve.loading import load

        return getattr(load, name)
    if name == "save_orbax":
        from jaxserve.loading.orbax_checkpoint import save_orbax

        return save_orbax
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
