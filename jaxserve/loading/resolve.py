"""resolve_model: from what a user names to files on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxserve.core import CheckpointError
from jaxserve.loading.safetensors_reader import is_safetensors_directory

Progress = Callable[[int, int, str], None]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
DEMO_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model's place on this machine.

    Attributes:
      kind: "hf" (directory with config.json and safetensors), "gguf" (one file) or "orbax" (directory).
      path: the directory or file.
      served_name: name on the API unless another is set.
    """

    kind: str
    path: Path
    served_name: str


def resolve_model(name: str, progress: Progress | None = None) -> ResolvedModel:
    """Finds a model, fetching it when it is the demo model or a hub id.

    Args:
      name: `smollm2-135m`, a Hugging Face directory, a .gguf file, an Orbax directory or a hub id.
      progress: told of a download.

    Raises:
      CheckpointError: nothing is there, what is there is not a model, or a download failed.
    """
    if name == DEMO_MODEL:
        from jaxserve.loading.demo_model import demo_model_file

        return ResolvedModel("gguf", demo_model_file(progress), DEMO_MODEL)
    path = Path(name).expanduser()
    if name and path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"model {name!r} is a file that does not end in .gguf; give its directory or a .gguf")
        return ResolvedModel("gguf", path, path.stem)
    if name and path.is_dir():
        return _directory(path, path.resolve().name)
    if _HUB_ID.fullmatch(name):
        from jaxserve.loading.hub import download

        return _directory(download(name, progress), name)
    raise CheckpointError(
        f"model {name!r} was not found; give {DEMO_MODEL}, a Hugging Face directory, a .gguf file, an Orbax"
        " directory or a hub id such as owner/name"
    )


def _directory(path: Path, served_name: str) -> ResolvedModel:
    from jaxserve.loading.orbax_layout import is_orbax_directory

    if is_orbax_directory(path):
        return ResolvedModel("orbax", path, served_name)
    if is_safetensors_directory(path):
        return ResolvedModel("hf", path, served_name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ResolvedModel("gguf", ggufs[0], served_name)
    if ggufs:
        listed = ", ".join(file.name for file in ggufs)
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files ({listed}); give one of them as the model")
    if any(next(path.glob(pattern), None) for pattern in _OTHER_WEIGHTS):
        raise CheckpointError(
            f"{path} has weights in another format; only safetensors, GGUF and Orbax are read:"
            " convert them with transformers' save_pretrained"
        )
    raise CheckpointError(f"{path} holds no weights; a model directory has safetensors, a GGUF or an Orbax checkpoint")
