"""Values of a GGUF file's metadata under its architecture's prefix, checked as they are read."""

from __future__ import annotations

from typing import Any

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.gguf_file import GgufFile


class GgufFields:
    """Metadata of the type asked for; keys without the architecture's name.

    Every method raises CheckpointError for a value that is missing and has no default, or of another type, and
    UnsupportedModelError for a list whose items differ.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self._prefix = gguf.metadata["general.architecture"]

    def raw(self, key: str) -> Any:
        """The value as the file has it, lists too; None: there is none."""
        return self.gguf.metadata.get(f"{self._prefix}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """An integer."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.gguf.path}: {self._prefix}.{key} is {value!r}; it must be an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """An integer or a float."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.gguf.path}: {self._prefix}.{key} is {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.gguf.path}: {self._prefix}.{key} is {value!r}; it must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        return str(self._value(key, default))

    def _value(self, key: str, default: Any) -> Any:
        name = f"{self._prefix}.{key}"
        value = self.gguf.metadata.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.gguf.path} lacks the metadata {name}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{self.gguf.path}: {name} differs from layer to layer")
            value = value[0]
        return value
