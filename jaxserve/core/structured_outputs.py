"""StructuredOutputs: what a request's text must be, as the client wrote it.

Names follow vLLM's `StructuredOutputsParams`. Only shapes are checked here; whether a schema, expression or grammar
can be followed is found when the engine compiles it.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_CHOICES = 16384
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of `StructuredOutputs`, of which exactly one is set."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """One constraint on the whole text of an output.

    Attributes:
      json: a JSON schema, as text or as a mapping (which becomes text); the output is a document that meets it.
      regex: an expression that the whole output matches, in the syntax of Rust's `regex`, without look-around.
      choice: the output is one of these texts.
      grammar: a context-free grammar in llguidance's variant of Lark, or in GBNF.
      json_object: the output is any JSON object; False is the same as None.
      disable_any_whitespace: JSON without blanks between its parts.
      whitespace_pattern: expression for the blanks between a document's parts; None: up to 32 blanks.

    Raises:
      ValueError: no constraint or several, a field of the wrong kind, or one that has no meaning there.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.json_object is False:
            set_(self, "json_object", None)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}; got {got}")
        self._check_kinds()
        if not isinstance(self.json, str | None):
            set_(self, "json", _as_text(self.json))
        if self.choice is not None:
            set_(self, "choice", tuple(self.choice))
            self._check_choices()

    @property
    def constraint(self) -> str:
        """The field of `CONSTRAINTS` that is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def size(self) -> int:
        """Bytes of the constraint's text."""
        texts = self.choice or (self.json, self.regex, self.grammar, self.whitespace_pattern)
        return sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))

    def _check_kinds(self) -> None:
        if not isinstance(self.json, str | Mapping | bool | None):
            raise ValueError(f"structured_outputs.json must be a JSON schema; got {type(self.json).__name__}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise ValueError(f"structured_outputs.{name} must be a string; got {type(value).__name__}")
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if not isinstance(value, bool | None):
                raise ValueError(f"structured_outputs.{name} must be true or false; got {value!r}")
        if not isinstance(self.choice, Sequence | None) or isinstance(self.choice, str | bytes):
            raise ValueError(f"structured_outputs.choice must be a list of strings; got {type(self.choice).__name__}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("structured_outputs has whitespace_pattern and disable_any_whitespace; give one of them")
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and self.constraint not in ("json", "json_object"):
                raise ValueError(f"structured_outputs.{name} is for json and json_object; leave it out")

    def _check_choices(self) -> None:
        choices = self.choice or ()
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise ValueError(f"structured_outputs.choice has {len(choices)} texts; it must have 1 to {MAX_CHOICES}")
        for text in choices:
            if not isinstance(text, str) or not text:
                raise ValueError(f"structured_outputs.choice must hold strings that are not empty; got {text!r}")


FIELDS = tuple(field.name for field in fields(StructuredOutputs))


def _as_text(schema: Any) -> str:
    try:
        return json_module.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is no JSON: {error}") from None
