"""The input of /v1/responses -> the messages a chat template reads."""

from __future__ import annotations

from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.server.messages import MAX_ID_CHARS, MAX_MESSAGES, text_of, tool_call

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output")


def read_input(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """The messages, `instructions` first as the system's.

    Calls that follow each other, or an assistant's message, are one message's, as templates expect them.

    Args:
      given: a string, which is the user's message, or a list of items.

    Raises:
      ApiError: 400 naming the item and the rule.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        got = "null" if given is None else "an empty list" if given == [] else type(given).__name__
        raise _error(f"input must be a string or a list of items; got {got}")
    if len(given) > MAX_MESSAGES:
        raise _error(f"input has {len(given)} items; the limit is {MAX_MESSAGES}")
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise _error(f"{where} must be an object; got {type(item).__name__}")
        match item.get("type", "message"):
            case "message":
                messages.append(_message(where, item))
            case "function_call":
                call = tool_call(where, item.get("call_id"), where, item, id_name="call_id")
                if messages[-1:] == [] or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(_output(where, item))
            case "item_reference":
                raise _error(f"{where} is a reference, but this server keeps no items; send the item itself")
            case kind:
                got = repr(kind[:50]) if isinstance(kind, str) else type(kind).__name__
                raise _error(f"{where}.type is {got}; it must be one of {', '.join(_ITEMS)}")
    return messages


def _message(where: str, item: dict[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        got = repr(role[:50]) if isinstance(role, str) else type(role).__name__
        raise _error(f"{where}.role is {got}; it must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": text_of(f"{where}.content", item.get("content"), _TEXT_PARTS)}


def _output(where: str, item: dict[str, Any]) -> dict[str, Any]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise _error(f"{where}.call_id must be the id of the call that this item answers")
    if len(call_id) > MAX_ID_CHARS:
        raise _error(f"{where}.call_id has {len(call_id)} characters; the limit is {MAX_ID_CHARS}")
    content = text_of(f"{where}.output", item.get("output"), _TEXT_PARTS)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _error(message: str) -> ApiError:
    return ApiError("invalid", message, param="input")
