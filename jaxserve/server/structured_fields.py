"""Fields that say what an output must be, in the spellings of OpenAI, vLLM (new and old) and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jaxserve.core import StructuredOutputs
from jaxserve.core.structured_outputs import FIELDS
from jaxserve.server.errors import ApiError

_FORMATS = ("text", "json_object", "json_schema")
_NOT_SUPPORTED = ("structural_tag", "disable_additional_properties")
"""Members of vLLM's `structured_outputs` that this version does not have."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint of a request.

    Attributes:
      field: of the request.
      spelling: where in it the constraint stands, as the client wrote it.
    """

    field: str
    spelling: str
    wanted: StructuredOutputs

    def error(self, message: str) -> ApiError:
        """400 for what is wrong with it, in the client's spelling."""
        return _error(self.field, message, self.spelling)


class StructuredFields(BaseModel):
    """The fields; at most one of them asks for something."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether any of them is there; `constraint` says what they ask for."""
        return any(getattr(self, name) is not None for name in StructuredFields.model_fields)

    def constraint(self) -> Constraint | None:
        """What they ask for; None: nothing. Takes time for a large schema.

        Raises:
          ApiError: 400; several constraints, or one that is malformed.
        """
        asked = self._asked()
        if len(asked) > 1:
            fields = " and ".join(asked)
            raise ApiError("invalid", f"{fields} each say what the output must be; give one", param=list(asked)[-1])
        if not asked:
            if self.guided_whitespace_pattern is not None:
                message = "guided_whitespace_pattern needs guided_json; leave it out"
                raise ApiError("invalid", message, param="guided_whitespace_pattern")
            return None
        ((field, (spelling, values)),) = asked.items()
        if self.guided_whitespace_pattern is not None:
            values = values | {"whitespace_pattern": self.guided_whitespace_pattern}
        try:
            return Constraint(field, spelling, StructuredOutputs(**values))
        except ValueError as error:
            raise _error(field, str(error), spelling) from None

    def _asked(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Per field that asks for something: its spelling, and the arguments of a `StructuredOutputs`."""
        plain = {
            "guided_json": "json",
            "guided_regex": "regex",
            "guided_choice": "choice",
            "guided_grammar": "grammar",
            "json_schema": "json",
            "regex": "regex",
            "ebnf": "grammar",
        }
        asked = {
            field: (field, {name: getattr(self, field)})
            for field, name in plain.items()
            if getattr(self, field) is not None
        }
        if self.response_format is not None:
            values = _format(self.response_format)
            if values:
                asked["response_format"] = ("response_format.json_schema.schema", values)
        if self.structured_outputs is not None:
            asked["structured_outputs"] = ("", _members(self.structured_outputs))
        return asked


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that OpenAI's `response_format` stands for; none for text."""
    kind = given.get("type")
    if kind not in _FORMATS:
        raise _error("response_format", f"response_format.type is {kind!r}; it must be one of {', '.join(_FORMATS)}")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema")
    if not isinstance(named, dict):
        raise _error("response_format", "response_format.json_schema must be an object with name and schema")
    if named.get("schema") is None:
        raise _error("response_format", "response_format.json_schema.schema is required")
    if not isinstance(named.get("strict"), bool | None):
        raise _error("response_format", "response_format.json_schema.strict must be true or false")
    return {"json": named["schema"]}


def _members(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that vLLM's `structured_outputs` stands for."""
    for name in _NOT_SUPPORTED:
        if given.get(name) not in (None, False):
            raise _error("structured_outputs", f"structured_outputs.{name} is not supported; leave it out")
    return {name: value for name, value in given.items() if name in FIELDS and value is not None}


def _error(field: str, message: str, spelling: str = "") -> ApiError:
    first, _, rest = message.partition(" ")
    if spelling and first.startswith("structured_outputs"):
        message = f"{spelling} {rest}"
    return ApiError("invalid", message, param=field)
