"""Qwen3-Coder: tags around names and values.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text; the schema of the function's parameters says whether it stands for another JSON value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import MalformedCallError, Reading, Source

_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class Qwen3CoderParser(ToolParser):
    """See the module."""

    MARKS = ("<tool_call>", "<function=")
    SPECIAL_TOKENS = ("<tool_call>", "</tool_call>")

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """One call; the outer tags may be missing."""
        tagged = yield from source.accepts("<tool_call>")
        yield from source.space()
        yield from source.literal("<function=")
        name = yield from source.word()
        yield from source.literal(">")
        schema = self.tools.get(name)
        if schema is None:
            raise MalformedCallError
        arguments = []
        while True:
            yield from source.space()
            if (yield from source.accepts("</function>")):
                break
            yield from source.literal("<parameter=")
            key = yield from source.word()
            yield from source.literal(">")
            value = (yield from source.until("</parameter>")).removeprefix("\n").removesuffix("\n")
            arguments.append(f"{_quoted(key)}: {_json_value(value, _types(schema, key))}")
        if tagged:
            yield from source.space()
            if source.at < len(source.text):
                yield from source.literal("</tool_call>")
        return [self.call(name, "{" + ", ".join(arguments) + "}")]


def _types(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a parameter may have; none known: empty."""
    properties = schema.get("properties")
    entry = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(entry, Mapping):
        return set()
    found: set[str] = set()
    choices = [entry.get(name) for name in ("anyOf", "oneOf")]
    for part in (entry, *(part for parts in choices if isinstance(parts, list) for part in parts)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        found.update(name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))
    return found


def _json_value(text: str, types: set[str]) -> str:
    """The value as JSON: what `text` says where a type allows it, else a string."""
    written = text.strip()
    if "boolean" in types and written in ("True", "False"):
        return written.lower()
    if "null" in types and written == "None":
        return "null"
    if types - {"string"}:
        try:
            value = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return _quoted(text)
        if types.intersection(_JSON_TYPES[type(value)]) and not isinstance(value, str):
            return written
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
