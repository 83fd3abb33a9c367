"""JsonFields: reads a JSON object field by field, and says which field breaks which rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_INTEGER = 2**63 - 1
"""Of an integer field: what 64 bits and a float hold."""
MAX_TOKENS = 2**24
"""Of a prompt or an output: each of a prompt's tokens takes memory."""
REQUIRED: Any = object()
"""Default of a field that must be given."""

_KINDS = {dict: "object", list: "list", str: "text", bool: "true or false"}


def read_json(path: str | Path) -> Any:
    """The document in a file.

    Raises:
      ValueError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


class JsonFields:
    """One JSON object, named `where` in messages. `close` refuses fields that nobody asked for.

    Raises:
      ValueError: by every method, naming field, rule and value.
    """

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, Mapping):
            raise ValueError(f"{where} is {_shown(document)}; it must be an object")
        self._document = document
        self._where = where
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._document

    def name_of(self, name: str) -> str:
        """How a message names a field."""
        return f"{self._where}.{name}"

    def any(self, name: str, default: Any = REQUIRED) -> Any:
        """The value as it is."""
        self._asked.add(name)
        if name in self._document:
            return self._document[name]
        if default is REQUIRED:
            raise ValueError(f"{self.name_of(name)} is missing; it must be given")
        return default

    def integer(self, name: str, low: int, default: Any = REQUIRED, *, most: int = MAX_INTEGER) -> int:
        """An integer of at least `low` and at most `most`."""
        value = self.any(name, default)
        if value is default and name not in self._document:
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{self.name_of(name)} is {_shown(value)}; it must be an integer of at least {low}")
        if value > most:
            raise ValueError(f"{self.name_of(name)} is {_shown(value)}; it must be at most {most}")
        return value

    def number(
        self, name: str, default: Any = REQUIRED, *, above: float | None = None, low: float | None = None
    ) -> float:
        """A finite number, above `above` and at least `low`."""
        value = self.any(name, default)
        if value is default and name not in self._document:
            return value  # type: ignore[no-any-return]
        rule = "a finite number"
        rule += f" above {above:g}" if above is not None else ""
        rule += f" of at least {low:g}" if low is not None else ""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not is_finite(value)
            or (above is not None and value <= above)
            or (low is not None and value < low)
        ):
            raise ValueError(f"{self.name_of(name)} is {_shown(value)}; it must be {rule}")
        return float(value)

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """A text that is not empty."""
        value = self._typed(name, str, default)
        if name in self._document and not value:
            raise ValueError(f"{self.name_of(name)} is empty; it must be a text")
        return value  # type: ignore[no-any-return]

    def boolean(self, name: str, default: Any = REQUIRED) -> bool:
        """true or false."""
        return self._typed(name, bool, default)  # type: ignore[no-any-return]

    def choice(self, name: str, choices: Sequence[str], default: Any = REQUIRED) -> str:
        """One of a few words."""
        value = self.any(name, default)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{self.name_of(name)} is {_shown(value)}; it must be one of {', '.join(choices)}")
        return value

    def items(self, name: str, default: Any = REQUIRED) -> list[Any]:
        """A list."""
        return self._typed(name, list, default)  # type: ignore[no-any-return]

    def object(self, name: str, default: Any = REQUIRED) -> JsonFields:
        """An object inside this one."""
        return JsonFields(self.any(name, default), self.name_of(name))

    def close(self) -> None:
        """Refuses what was not asked for: a misspelt field must not be silently without effect."""
        unknown = [name for name in self._document if name not in self._asked]
        if unknown:
            known = ", ".join(sorted(self._asked))
            raise ValueError(f"{self.name_of(unknown[0])} is not a field; the fields of {self._where} are {known}")

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self.any(name, default)
        if value is default and name not in self._document:
            return value
        if not isinstance(value, kind):
            raise ValueError(f"{self.name_of(name)} is {_shown(value)}; it must be {_KINDS[kind]}")
        return value


def is_finite(value: float) -> bool:
    """Whether a float holds it; an integer of JSON may be of any size."""
    return -math.inf < value < math.inf and (isinstance(value, float) or abs(value) <= MAX_INTEGER)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
