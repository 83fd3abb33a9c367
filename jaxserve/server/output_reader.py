"""An output's text -> contents and calls, piece by piece as they come: one reader per choice."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from jaxserve.text.tool_calls import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import MalformedCallError, Reading, Source

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Attributes:
      index: its number in the output.
      id: fresh.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON text.

    Attributes:
      index: the call's number.
    """

    index: int
    text: str


type Piece = Content | CallStart | CallArguments


class OutputReader:
    """Reads text that is all content, and is the base of the others.

    Args:
      id_form: see `ToolParser.CALL_IDS`.

    Attributes:
      num_calls: seen so far.
    """

    def __init__(self, id_form: tuple[str, int] = ToolParser.CALL_IDS) -> None:
        self.num_calls = 0
        self._id_form = id_form

    def feed(self, text: str, last: bool) -> list[Piece]:
        """What `text` completes.

        Args:
          last: nothing follows.
        """
        return [Content(text)] if text else []

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """The choice's reason to end, which is its calls if it ended by itself."""
        return "tool_calls" if self.num_calls and finish_reason == "stop" else finish_reason

    def _start(self, name: str) -> CallStart:
        """The beginning of the next call."""
        prefix, size = self._id_form
        call_id = prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(size))
        self.num_calls += 1
        return CallStart(self.num_calls - 1, call_id, name)


class ParserReader(OutputReader):
    """Reads calls in the model's own format.

    Args:
      parser: of that format, fresh.
      parallel: False: calls after the first are left out.
    """

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        super().__init__(parser.CALL_IDS)
        self._parser = parser
        self._parallel = parallel

    def feed(self, text: str, last: bool) -> list[Piece]:
        """See `OutputReader`."""
        found = self._parser.feed(text)
        if last:
            found += self._parser.finish()
        pieces: list[Piece] = []
        for part in found:
            if not isinstance(part, ToolCall):
                pieces.append(Content(part))
            elif self._parallel or not self.num_calls:
                start = self._start(part.name)
                pieces += [start, CallArguments(start.index, part.arguments)]
        return pieces


class ArgumentsReader(OutputReader):
    """Reads an output that was made to be the arguments of a function.

    Args:
      name: the function's.
    """

    def __init__(self, name: str, id_form: tuple[str, int]) -> None:
        super().__init__(id_form)
        self._name = name

    def feed(self, text: str, last: bool) -> list[Piece]:
        """See `OutputReader`; arguments are given out as they are written."""
        if not text:
            return []
        start = [] if self.num_calls else [self._start(self._name)]
        return [*start, CallArguments(0, text)]


class CallListReader(OutputReader):
    """Reads an output that was made to be a list of calls (`call_list_schema`).

    Arguments are given out as they are written. Of an output that was cut, a call whose arguments had begun is one;
    what is left of the next is content.
    """

    def __init__(self, id_form: tuple[str, int]) -> None:
        super().__init__(id_form)
        self._source = Source("")
        self._told = 0  # of the source's text
        self._reading = self._read(self._source)
        self._in_arguments = False

    def feed(self, text: str, last: bool) -> list[Piece]:
        """See `OutputReader`."""
        self._source.text += text
        self._source.complete = last
        pieces: list[Piece] = []
        try:
            while (piece := next(self._reading)) is not None:
                pieces.append(piece)
        except (MalformedCallError, StopIteration):
            rest = self._source.text[self._told :]
            self._told += len(rest)
            if rest.strip():
                pieces.append(CallArguments(self.num_calls - 1, rest) if self._in_arguments else Content(rest))
        return pieces

    def _read(self, source: Source) -> Generator[Piece | None, None, None]:
        """The pieces of the list; None while text is missing."""
        yield from source.space()
        yield from source.literal("[")
        while True:
            yield from _key(source, "{", "name")
            name = json.loads((yield from source.json()))
            yield from _key(source, ",", "parameters")
            yield from source.space()
            yield from source.peek()
            self._told = source.at
            self._in_arguments = True
            yield self._start(name)
            yield from self._arguments(source)
            self._in_arguments = False
            yield from source.space()
            yield from source.literal("}")
            yield from source.space()
            self._told = source.at
            if not (yield from source.accepts(",")):
                break
        yield from source.literal("]")
        self._told = source.at

    def _arguments(self, source: Source) -> Generator[Piece | None, None, None]:
        for _ in source.json():
            yield from self._more(source)
            yield None
        yield from self._more(source)

    def _more(self, source: Source) -> Generator[Piece]:
        if source.at > self._told:
            text = source.text[self._told : source.at]
            self._told = source.at
            yield CallArguments(self.num_calls - 1, text)


def _key(source: Source, before: str, name: str) -> Reading[None]:
    """Reads `before`, a member's name and the colon."""
    for word in (before, f'"{name}"', ":"):
        yield from source.space()
        yield from source.literal(word)


@dataclass(slots=True)
class Message:
    """An assistant's message put together from pieces.

    Attributes:
      content: all text.
      calls: as a chat message has them.
    """

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Appends a piece."""
        match piece:
            case Content():
                self.content += piece.text
            case CallStart():
                function = {"name": piece.name, "arguments": ""}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            case CallArguments():
                self.calls[piece.index]["function"]["arguments"] += piece.text
