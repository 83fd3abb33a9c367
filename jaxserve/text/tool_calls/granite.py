"""Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import Reading, Source


class GraniteParser(ToolParser):
    """See the module."""

    MARKS = ("<|tool_call|>", "<tool_call>")
    SPECIAL_TOKENS = ("<|tool_call|>", "<tool_call>", "<|/tool_call|>")

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """A list of calls, or one; a closing tag may follow."""
        if not (yield from source.accepts("<|tool_call|>")):
            yield from source.literal("<tool_call>")
        yield from source.space()
        calls = self.calls_of((yield from source.json()))
        yield from source.accepts("<|/tool_call|>")
        return calls
