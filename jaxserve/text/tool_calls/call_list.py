"""What a request that requires calls is made to write: a JSON list of calls, whatever the model's own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def call_list_schema(tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The JSON schema of such a list.

    Args:
      tools: the schema of each function's parameters, by the function's name.
      parallel: several calls are allowed.
    """
    calls = []
    for index, (name, schema) in enumerate(tools.items()):
        place = f"#/items/anyOf/{index}/properties/parameters"
        properties = {"name": {"const": name}, "parameters": _moved(schema or {"type": "object"}, place)}
        required = ["name", "parameters"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    limits = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **limits, "items": {"anyOf": calls}}


def _moved(value: Any, place: str) -> Any:
    """A schema whose references are right where it is put."""
    if isinstance(value, Mapping):
        return {key: _reference(item, place) if key == "$ref" else _moved(item, place) for key, item in value.items()}
    return [_moved(item, place) for item in value] if isinstance(value, list) else value


def _reference(target: Any, place: str) -> Any:
    return place + target[1:] if isinstance(target, str) and target.startswith("#") else _moved(target, place)
