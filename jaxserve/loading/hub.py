"""Models from the Hugging Face hub, through the user's own cache, token and proxy settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxserve.core import CheckpointError

Progress = Callable[[int, int, str], None]
# `original/` and `consolidated` are second copies of the weights in other layouts.
_WANTED = ["*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*"]


def download(name: str, progress: Progress | None = None) -> Path:
    """The local snapshot of a hub model, downloaded as far as it is not there yet.

    Args:
      name: owner/name, optionally with @revision.
      progress: told that a download starts; the hub library shows its own bars.

    Raises:
      CheckpointError: no such model, no access, or the hub cannot be reached and nothing is cached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    if progress is not None:
        progress(0, 1, f"fetching {name} from the Hugging Face hub")
    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model {name!r} is no local path and the Hugging Face hub cannot be reached;"
            " check the network (and HF_HUB_OFFLINE), or give a local directory"
        ) from error
    except Exception as error:  # the hub library and its HTTP client raise many kinds
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"model {name!r} is no local path and could not be fetched from the Hugging Face hub: {first_line}"
        ) from error
    return Path(folder)
