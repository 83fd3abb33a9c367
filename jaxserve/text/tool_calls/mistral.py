"""Mistral: `[TOOL_CALLS]` before a list of objects, or (from tokenizer version 11 on) before each name.

[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ...]
[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{"b": 2}
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}
"""

from __future__ import annotations

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser, json_object
from jaxserve.text.tool_calls.source import Reading, Source


class MistralParser(ToolParser):
    """See the module."""

    MARKS = ("[TOOL_CALLS]",)
    CALL_IDS = ("", 9)  # what the templates insist on when a call comes back
    SPECIAL_TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """The list, or one call."""
        yield from source.literal("[TOOL_CALLS]")
        yield from source.space()
        if (yield from source.peek()) == "[":
            return self.calls_of((yield from source.json()))
        name = yield from source.word()
        if (yield from source.accepts("[CALL_ID]")):
            yield from source.word()
        yield from source.accepts("[ARGS]")
        return [self.call(name, json_object((yield from source.json())))]
