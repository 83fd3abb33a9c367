"""Chat messages as a request holds them -> the plain dicts a chat template reads."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.text.tool_calls import is_json_object

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Of a message's content."""
MAX_CALLS = 1024
"""Of a message."""
MAX_ID_CHARS = 1024
"""Of a call's id, and of its function's name."""
MAX_ARGUMENTS_CHARS = 262144
"""Of a call in a message; they are parsed to be checked."""


class ChatEnd(Enum):
    """How the text of a conversation ends."""

    GENERATION_PROMPT = "the opening of the assistant's turn"
    TURN = "the end of the last message's turn"
    CONTENT = "the last message's content, to be continued"


def chat_end(
    messages: list[dict[str, Any]], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> ChatEnd:
    """The end that a request asks for.

    Raises:
      ApiError: 400; both are asked for, or the last message is not the assistant's.
    """
    if not continue_final_message:
        return ChatEnd.TURN if add_generation_prompt is False else ChatEnd.GENERATION_PROMPT
    if add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; set one of them"
        raise ApiError("invalid", message, param="continue_final_message")
    role = messages[-1]["role"]
    if role != "assistant":
        message = f"continue_final_message needs a last message of role assistant; its role is {role}"
        raise ApiError("invalid", message, param="continue_final_message")
    if "tool_calls" in messages[-1]:
        message = "continue_final_message needs a last message without tool_calls"
        raise ApiError("invalid", message, param="continue_final_message")
    return ChatEnd.CONTENT


def normalize_messages(messages: list[Any] | None) -> list[dict[str, Any]]:
    """Checks messages and flattens their content to text.

    Text parts are joined with a newline, as templates expect one string. OpenAI's `developer` role is
    `system` here: templates know only the older name. Arguments of `tool_calls` are JSON text; null content, which
    messages with calls may have, is "".

    Raises:
      ApiError: 400 naming the message and the rule.
    """
    if not messages:
        raise ApiError("invalid", "messages is empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise _error(f"messages has {len(messages)} messages; the limit is {MAX_MESSAGES}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _error(f"{where} must be an object with role and content; got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        got = repr(role[:50]) if isinstance(role, str) else type(role).__name__
        raise _error(f"{where}.role is {got}; it must be one of {', '.join(ROLES)}")
    for field, instead in (("function_call", "use tool_calls"), ("audio", "leave it out")):
        if message.get(field):
            raise _error(f"{where}.{field} is not supported; {instead}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    result = {"role": "system" if role == "developer" else role, "content": text_of(f"{where}.content", content)}
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if calls:
        if role != "assistant":
            raise _error(f"{where}.tool_calls belongs to messages of role assistant; the role is {role}")
        result["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    if role == "tool":
        if not isinstance(call_id, str) or not call_id:
            raise _error(f"{where}.tool_call_id must be the id of the call that this message answers")
        result["tool_call_id"] = _short(f"{where}.tool_call_id", call_id)
    elif call_id:
        raise _error(f"{where}.tool_call_id belongs to messages of role tool; the role is {role}")
    return result


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _error(f"{where} must be a list; got {type(calls).__name__}")
    if len(calls) > MAX_CALLS:
        raise _error(f"{where} has {len(calls)} calls; the limit is {MAX_CALLS}")
    result = []
    for index, call in enumerate(calls):
        each = f"{where}[{index}]"
        if not isinstance(call, dict) or call.get("type", "function") != "function":
            raise _error(f"{each} must be an object with id and function, of type function")
        function = call.get("function")
        if not isinstance(function, dict):
            raise _error(f"{each}.function must be an object with name and arguments; got {type(function).__name__}")
        result.append(tool_call(each, call.get("id"), f"{each}.function", function))
    return result


def tool_call(where: str, call_id: Any, inside: str, function: dict[str, Any], id_name: str = "id") -> dict[str, Any]:
    """A call as messages have it.

    Args:
      where: of the call.
      inside: of its function, for messages.
      function: has `name` and `arguments`.
      id_name: the member that `call_id` is from.

    Raises:
      ApiError: 400 naming the member and the rule.
    """
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not call_id:
        raise _error(f"{where}.{id_name} must be a string that is not empty")
    if not isinstance(name, str) or not name:
        raise _error(f"{inside}.name must be a string that is not empty")
    _short(f"{where}.{id_name}", call_id)
    _short(f"{inside}.name", name)
    if arguments is None or arguments == "":
        arguments = "{}"
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENTS_CHARS:
        raise _error(f"{inside}.arguments has {len(arguments)} characters; the limit is {MAX_ARGUMENTS_CHARS}")
    if not isinstance(arguments, str) or not is_json_object(arguments):
        raise _error(f"{inside}.arguments must be a string that holds a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(where: str, content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message's content.

    Args:
      kinds: of the parts that are text.

    Raises:
      ApiError: 400; it is neither a string nor a list of text parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{where} must be a string or a list of text parts; got {type(content).__name__}")
    if len(content) > MAX_PARTS:
        raise _error(f"{where} has {len(content)} parts; the limit is {MAX_PARTS}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        kind = kind[:50] if isinstance(kind, str) else type(kind).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            message = f"{where}[{index}] has type {kind!r}; only text parts with a string are supported"
            raise _error(message)
        texts.append(part["text"])
    return "\n".join(texts)


def _short(where: str, text: str) -> str:
    """`text`, unless it is too long for an id or a name."""
    if len(text) > MAX_ID_CHARS:
        raise _error(f"{where} has {len(text)} characters; the limit is {MAX_ID_CHARS}")
    return text


def _error(message: str) -> ApiError:
    """The field at fault is what the message begins with."""
    return ApiError("invalid", message, param=re.split(r"[\[. ]", message, maxsplit=1)[0])
