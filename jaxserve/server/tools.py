"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.server.service import num_chars

MAX_TOOLS = 128
"""As OpenAI has it."""
MAX_TOOLS_CHARS = 1 << 18
"""Of all tools together, schemas included."""
MAX_TOOL_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model call.

    Attributes:
      tools: as chat templates read them; at least one.
      choice: "auto": a call or an answer; "required": a call; "function": a call of the only one in `tools`.
      parallel: several calls in one answer.
    """

    tools: list[dict[str, Any]]
    choice: str
    parallel: bool

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of each function's parameters, by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def parse_tools(tools: list[Any] | None, choice: Any, parallel: bool | None, *, flat: bool = False) -> ToolUse | None:
    """What a request lets the model call; None: nothing.

    Args:
      tools, choice, parallel: the fields, null where they are absent.
      flat: a tool has its function's members itself, as /v1/responses has it.

    Raises:
      ApiError: 400 naming the tool and the rule.
    """
    name = _chosen_name(choice, flat)
    if not tools:
        if name or choice == "required":
            raise _error("tool_choice needs tools; give tools or leave it out", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise _error(f"tools has {len(tools)} tools; the limit is {MAX_TOOLS}")
    if num_chars(tools, MAX_TOOLS_CHARS) > MAX_TOOLS_CHARS:
        raise _error(f"tools is too large; the limit is {MAX_TOOLS_CHARS} characters")
    parsed = [_tool(f"tools[{index}]", tool, flat) for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in parsed]
    for index, each in enumerate(names):
        if each in names[:index]:
            raise _error(f"tools[{index}] has the name {each!r} of an earlier tool; names must differ")
    if choice == "none":
        return None
    if name:
        if name not in names:
            raise _error(f"tool_choice names {name[:128]!r}, which is not among tools", "tool_choice")
        parsed = [tool for tool in parsed if tool["function"]["name"] == name]
    return ToolUse(parsed, "function" if name else choice or "auto", parallel is not False and not name)


def _chosen_name(choice: Any, flat: bool) -> str:
    """The function that `tool_choice` names; "": none."""
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice if flat else choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return name
    form = '{"type": "function", "name": ...}' if flat else '{"type": "function", "function": {"name": ...}}'
    raise _error(f"tool_choice must be one of {', '.join(_CHOICES)}, or {form}", "tool_choice")


def _tool(where: str, tool: Any, flat: bool) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _error(f"{where} must be an object; got {type(tool).__name__}")
    kind = tool.get("type")
    if kind != "function":
        got = repr(kind[:50]) if isinstance(kind, str) else type(kind).__name__
        raise _error(f"{where}.type is {got}; only tools of type function are supported")
    inside = where if flat else f"{where}.function"
    function = tool if flat else tool.get("function")
    if not isinstance(function, dict):
        raise _error(f"{inside} must be an object with name and parameters; got {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(f"{inside}.name must have 1 to 128 characters: letters, digits and any of _ . : / -")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise _error(f"{inside}.description must be a string; got {type(description).__name__}")
    if parameters is not None and not isinstance(parameters, dict):
        raise _error(f"{inside}.parameters must be a JSON schema, an object; got {type(parameters).__name__}")
    if _depth_exceeds(parameters, MAX_TOOL_DEPTH):
        raise _error(f"{inside}.parameters is nested deeper than {MAX_TOOL_DEPTH} levels")
    # Only what templates know: some write a tool out as it is.
    written: dict[str, Any] = {"name": name}
    if description is not None:
        written["description"] = description
    written["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": written}


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True


def _error(message: str, param: str = "tools") -> ApiError:
    return ApiError("invalid", message, param=param)
