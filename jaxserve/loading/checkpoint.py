"""What every checkpoint format offers: tensors under their Hugging Face names.

A reader is cheap to open: it looks at headers only, so that a wrong or damaged file is refused before anything
is read. `read` gives one tensor or a part of it, so no more than a few live on the host at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.core import CheckpointError

Part = tuple[slice, ...]


class CheckpointReader(Protocol):
    """A model's configuration and tensors; `read` may be called from several threads.

    Attributes:
      name: file or directory, for messages.
      hf_config: as config.json.
      generation_config: as generation_config.json; {} when there is none.
    """

    name: str
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]

    def names(self) -> list[str]:
        """Tensor names; those without a Hugging Face name keep their own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as the Hugging Face checkpoint has it (linear layers [out, in])."""
        ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """The floating dtype that holds the tensor as it is stored: its own, or float32 of a quantised one."""
        ...

    def read(self, name: str, part: Part = ()) -> np.ndarray[Any, Any]:
        """The tensor in a floating dtype, or only a part of it; what lies outside of it is read no further than needed.

        One that is not writable is a view of the file, to be copied soon.

        Args:
          part: of each of the first axes; others are whole. Slices have bounds within the tensor and no step.
        """
        ...


class ExpectedWeight(Protocol):
    """The part of a `jaxserve.models.weights.Weight` that checking needs."""

    @property
    def hf_name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensors(self) -> tuple[str, ...]: ...

    @property
    def tensor_shape(self) -> tuple[int, ...]: ...


def check_tensors(reader: CheckpointReader, expected: Sequence[ExpectedWeight], ignored: Iterable[str]) -> None:
    """Compares a checkpoint's tensors with a model's weights, all from headers.

    Args:
      reader: the checkpoint.
      expected: the model's weights.
      ignored: names that may be there without use.

    Raises:
      CheckpointError: a weight is missing or has another shape, or a tensor has no use.
    """
    present = set(reader.names())
    for weight in expected:
        # Before names are made of a number that may be damaged.
        if "{}" in weight.hf_name and weight.shape[0] > len(present):
            raise CheckpointError(
                f"{reader.name} holds {len(present)} tensors; its config asks for {weight.shape[0]} of {weight.hf_name}"
            )
    wanted = {name: weight.tensor_shape for weight in expected for name in weight.tensors}  # the last sharer's reach
    missing = [name for name in wanted if name not in present]
    if missing:
        raise CheckpointError(f"{reader.name} lacks {_listed(missing)}, which its config asks for")
    unused = sorted(present - wanted.keys() - set(ignored))
    if unused:
        raise CheckpointError(f"{reader.name} holds {_listed(unused)}, which the model of its config has no use for")
    for name, asked in wanted.items():
        shape = reader.shape(name)
        if shape != asked:
            raise CheckpointError(
                f"{reader.name}: tensor {name} has shape {list(shape)}; its config asks for {list(asked)}"
            )


def _listed(names: Sequence[str], most: int = 5) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{noun} {', '.join(names[:most])}{more}"
