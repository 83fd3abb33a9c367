"""DeepSeek V3, R1 and V3.1: special tokens around each call.

<｜tool▁calls▁begin｜>
  <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>     V3, R1
  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                            V3.1
<｜tool▁calls▁end｜>
"""

from __future__ import annotations

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser, json_object
from jaxserve.text.tool_calls.source import MalformedCallError, Reading, Source

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepseekV3Parser(ToolParser):
    """See the module."""

    MARKS = (_ALL_BEGIN,)
    SPECIAL_TOKENS = (_ALL_BEGIN, _ALL_END, _BEGIN, _SEPARATOR, _END)

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """All calls."""
        yield from source.literal(_ALL_BEGIN)
        calls: list[ToolCall] = []
        while True:
            yield from source.space()
            if calls and (yield from source.accepts(_ALL_END)):
                return calls
            if calls and source.complete and source.at == len(source.text):
                return calls
            yield from source.literal(_BEGIN)
            calls.append((yield from self._call(source)))

    def _call(self, source: Source) -> Reading[ToolCall]:
        name = yield from source.word()
        yield from source.literal(_SEPARATOR)
        yield from source.space()
        fenced = name == "function" and (yield from source.peek()) != "{"
        if fenced:
            name = yield from source.word()
            yield from source.space()
            yield from source.literal("```json")
            yield from source.space()
        arguments = yield from source.json()
        if not arguments.startswith("{"):
            raise MalformedCallError
        yield from source.space()
        if fenced:
            yield from source.literal("```")
            yield from source.space()
        yield from source.literal(_END)
        return self.call(name, json_object(arguments))
