"""Llama 3.1 to 3.3: the message is `{"name": ..., "parameters": {...}}`, several apart by `;`.

It may begin with `<|python_tag|>`. Without that token a call is looked for at the message's beginning only, as an
object further on may be an example.
"""

from __future__ import annotations

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import Reading, Source


class Llama3JsonParser(ToolParser):
    """See the module."""

    MARKS = ("<|python_tag|>",)
    FIRST = ("{",)
    SPECIAL_TOKENS = ("<|python_tag|>",)

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """All calls."""
        yield from source.accepts("<|python_tag|>")
        calls: list[ToolCall] = []
        while True:
            yield from source.space()
            calls += self.calls_of((yield from source.json()))
            yield from source.space()
            if not (yield from source.accepts(";")):
                return calls
