"""What a chat template does with tools, found by rendering a small conversation.

Templates differ in what they expect of a message with tool calls: arguments as an object or as JSON text, and no
content as "" or as none. Which of these a template was written for shows in its output only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_USER = {"role": "user", "content": "probe"}
_CALL_ID = "probe0001"  # of the length that Mistral's templates insist on
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe_call", "content": "probe"}


@dataclass(frozen=True, slots=True)
class ToolForms:
    """What a template does with tools.

    Attributes:
      source: the template.
      writes_tools: it writes the functions it is given.
      writes_calls: it writes the calls of an assistant's message.
      arguments_are_text: it wants arguments as JSON text, not as an object.
      no_content: what it wants as the content of a message that has calls only.
    """

    source: str
    writes_tools: bool
    writes_calls: bool
    arguments_are_text: bool = False
    no_content: str | None = ""

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages as the template wants them.

        Args:
          messages: content is text; arguments of `tool_calls` are JSON text.
        """
        return [self._fit(message) if message.get("tool_calls") else message for message in messages]

    def _fit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            if not self.arguments_are_text:
                function["arguments"] = json.loads(function["arguments"])
            calls.append({**call, "function": function})
        return {**message, "content": message["content"] or self.no_content, "tool_calls": calls}


def find_tool_forms(template: ChatTemplate) -> ToolForms:
    """Renders with tools and calls, and looks at the text."""
    writes_tools = "probe_tool" in _rendered(template, [_USER])
    for as_text in (False, True):
        for no_content in ("", None):
            forms = ToolForms(template.source, writes_tools, True, as_text, no_content)
            if _has_call(_rendered(template, [_USER, *forms.fit([_message_with_call()]), _RESULT])):
                return forms
    return ToolForms(template.source, writes_tools, False)


def _message_with_call() -> dict[str, Any]:
    function = {"name": "probe_call", "arguments": '{"probe_key": "probe_value"}'}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return template.render(messages, tools=[_TOOL])
    except ChatTemplateError:
        return ""


def _has_call(text: str) -> bool:
    """The call is there, its arguments neither in Python's notation nor JSON within JSON."""
    written = all(word in text for word in ("probe_call", "probe_key", "probe_value"))
    return written and "{'probe_key'" not in text and '\\"probe_key' not in text
