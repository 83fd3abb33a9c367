"""What every checkpoint format offers: tensors under their Hugging Face names.

A reader is cheap to open: it looks at headers only, so that a wrong or damaged file is refused before anything
is read. `read` gives one tensor, so no more than a few live on the host at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.core import CheckpointError


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

    def read(self, name: str, rows: range | None = None) -> np.ndarray[Any, Any]:
        """The tensor, or only these rows of it (and nothing else is read), in a floating dtype.

        One that is not writable is a view of the file, to be copied soon.
        """
        ...


class ExpectedWeight(Protocol):
    """The part of a `jaxserve.models.weights.Weight` that checking needs."""

    @property
    def hf_name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def transpose(self) -> bool: ...

    @property
    def rows(self) -> range | None: ...

    @property
    def head_rows(self) -> tuple[int, int, range] | None: ...


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
    missing = [name for name in dict.fromkeys(weight.hf_name for weight in expected) if name not in present]
    if missing:
        raise CheckpointError(f"{reader.name} lacks {_listed(missing)}, which its config asks for")
    unused = sorted(present - {weight.hf_name for weight in expected} - set(ignored))
    if unused:
        raise CheckpointError(f"{reader.name} holds {_listed(unused)}, which the model of its config has no use for")
    for name, wanted in _tensor_shapes(expected).items():
        shape = reader.shape(name)
        if shape != wanted:
            raise CheckpointError(
                f"{reader.name}: tensor {name} has shape {list(shape)}; its config asks for {list(wanted)}"
            )


def _tensor_shapes(expected: Sequence[ExpectedWeight]) -> dict[str, tuple[int, ...]]:
    """Shapes in a Hugging Face checkpoint, by name; weights that share a tensor are one below the other in it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in expected:
        if weight.head_rows is not None:
            num_heads, size, _ = weight.head_rows
            shapes[weight.hf_name] = (num_heads * size, weight.shape[-2 if weight.transpose else -1])
            continue
        shape = weight.shape[::-1] if weight.transpose else weight.shape
        first = 0 if weight.rows is None else weight.rows.start
        shapes[weight.hf_name] = (first + shape[0], *shape[1:])
    return shapes


def _listed(names: Sequence[str], most: int = 5) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{noun} {', '.join(names[:most])}{more}"
