"""Chat messages as a request holds them -> the plain dicts a chat template reads."""

from __future__ import annotations

from enum import Enum
from typing import Any

from jaxserve.server.errors import ApiError

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 4096


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
    return ChatEnd.CONTENT


def normalize_messages(messages: list[Any] | None) -> list[dict[str, Any]]:
    """Checks messages and flattens their content to text.

    Text parts are joined with a newline, as templates expect one string. OpenAI's `developer` role is
    `system` here: templates know only the older name.

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
    for field in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(field):
            raise _error(f"{where}.{field} is not supported; leave it out")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    result = {"role": "system" if role == "developer" else role, "content": _text(where, content)}
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{where}.content must be a string or a list of text parts; got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        kind = kind[:50] if isinstance(kind, str) else type(kind).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            message = f"{where}.content[{index}] has type {kind!r}; only text parts with a string are supported"
            raise _error(message)
        texts.append(part["text"])
    return "\n".join(texts)


def _error(message: str) -> ApiError:
    return ApiError("invalid", message, param="messages")
