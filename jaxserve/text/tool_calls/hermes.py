"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one tag per call."""

from __future__ import annotations

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import Reading, Source


class HermesParser(ToolParser):
    """See the module."""

    MARKS = ("<tool_call>",)
    SPECIAL_TOKENS = ("<tool_call>", "</tool_call>")

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """One call; the closing tag may be missing at the text's end."""
        yield from source.literal("<tool_call>")
        yield from source.space()
        calls = self.calls_of((yield from source.json()))
        yield from source.space()
        if source.at < len(source.text):
            yield from source.literal("</tool_call>")
        return calls
