"""ToolParser: a model's text in, content and tool calls out, whole or while it arrives.

Rules, for every format:
- Cutting a text into pieces in any way gives the same content and the same calls.
- A call is given out once all of it is there and well formed: JSON that parses, of a function that the request has.
  Its arguments are as the model wrote them, wherever the format writes JSON.
- What looks like a call and is none, or was cut off, is content; no character but white space is ever lost.
- White space around calls is no content, but what separates two contents stays.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxserve.text.tool_calls.source import MAX_DEPTH, SPACES, MalformedCallError, Reading, Source

_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Reads what `Source.json` accepted; numbers of any length stay text."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_STRICT_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function to call.

    Attributes:
      arguments: a JSON object as text.
    """

    name: str
    arguments: str


class ToolParser(ABC):
    """Base of all formats; one object per output.

    Args:
      tools: the JSON schema of each function's parameters, by the function's name.
    """

    MARKS: ClassVar[tuple[str, ...]] = ()
    """A call begins with one of these."""
    FIRST: ClassVar[tuple[str, ...]] = ()
    """And with one of these where nothing but white space is before it."""
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = ()
    """Written by the format; kept in the text even where a vocabulary has them as special tokens."""
    CALL_IDS: ClassVar[tuple[str, int]] = ("call_", 24)
    """What ids of calls begin with, and how many characters follow."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self._text = ""
        self._at_beginning = True
        self._source: Source | None = None
        self._reading: Reading[list[ToolCall]] | None = None
        self._mark = ""
        self._spacing = _Spacing()
        # Of a complete text: marks that its rest is known not to hold. Else a text of many beginnings of calls would
        # be searched to its end for each.
        self._absent: set[str] = set()

    @abstractmethod
    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """Reads calls from their mark on; raises MalformedCallError when there are none."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """What `text` completes, in order: contents (never empty) and calls."""
        if self._source is None:
            self._text += text
        else:
            self._source.text += text
        return list(self._spacing.apply(self._advance(False)))

    def finish(self) -> list[str | ToolCall]:
        """What was kept back, at the text's end."""
        return [*self._spacing.apply(self._advance(True)), *self._spacing.finish()]

    def _advance(self, final: bool) -> Iterator[str | ToolCall]:
        while True:
            if self._source is None:
                yield from self._seek(final)
            if self._source is None or self._reading is None:
                return
            source = self._source
            source.complete = final
            try:
                next(self._reading)
                return
            except StopIteration as ended:
                yield from ended.value
                self._text = source.text[source.at :]
            except MalformedCallError:
                # Behind the mark another call may begin.
                yield self._mark
                self._text = source.text[len(self._mark) :]
            self._source = self._reading = None

    def _seek(self, final: bool) -> Iterator[str]:
        """Gives out content up to the next mark, and begins to read there."""
        if self._at_beginning:
            body = self._text.lstrip(SPACES)
            if not body and not final:
                return
            first = next((mark for mark in self.FIRST if body.startswith(mark)), None)
            if first is None and not final and any(mark.startswith(body) for mark in self.FIRST):
                return
            self._at_beginning = False
            if first is not None:
                yield self._text[: len(self._text) - len(body)]
                self._begin(body, first)
                return
        places = [(at, mark) for mark in self.MARKS if (at := self._text.find(mark)) >= 0]
        if places:
            at, mark = min(places, key=lambda place: (place[0], -len(place[1])))
            yield self._text[:at]
            self._begin(self._text[at:], mark)
            return
        held = 0 if final else _held_back(self._text, self.MARKS)
        text, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        yield text

    def _begin(self, text: str, mark: str) -> None:
        self._text = ""
        self._mark = mark
        self._source = Source(text, self._absent)
        self._reading = self.read(self._source)

    def call(self, name: str, arguments: str) -> ToolCall:
        """A call of a function that the request has; raises MalformedCallError for another."""
        if name not in self.tools:
            raise MalformedCallError
        return ToolCall(name, arguments)

    def calls_of(self, written: str) -> list[ToolCall]:
        """The calls of a JSON value: an object with `name` and `arguments` or `parameters`, or a list of them."""
        if written.startswith("["):
            calls = [self._call_of(item) for item in json_items(written)]
            if not calls:
                raise MalformedCallError
            return calls
        return [self._call_of(written)]

    def _call_of(self, written: str) -> ToolCall:
        members = json_members(written)
        name = _DECODER.decode(members.get("name", "null"))
        if not isinstance(name, str):
            raise MalformedCallError
        return self.call(name, json_object(members.get("arguments", members.get("parameters", "null"))))


def json_object(written: str) -> str:
    """A call's arguments: an object as it is written; also one within a JSON string, or null for none.

    Raises:
      MalformedCallError: it is something else.
    """
    if written.startswith("{"):
        return written
    value = _DECODER.decode(written)
    if value is None:
        return "{}"
    if isinstance(value, str) and is_json_object(value):
        return value
    raise MalformedCallError


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object, nested no deeper than `MAX_DEPTH`."""
    try:
        value = _STRICT_DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (child for outer in level for child in (outer.values() if isinstance(outer, dict) else outer))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def json_members(written: str) -> dict[str, str]:
    """The members of a JSON object that `Source.json` read, each value as it is written.

    Raises:
      MalformedCallError: it is another value.
    """
    if not written.startswith("{"):
        raise MalformedCallError
    members = {}
    at = _after_space(written, 1)
    while written[at] != "}":
        key, at = _DECODER.raw_decode(written, at)
        start = _after_space(written, _after_space(written, at) + 1)
        _, end = _DECODER.raw_decode(written, start)
        members[key] = written[start:end]
        at = _after_comma(written, end)
    return members


def json_items(written: str) -> list[str]:
    """The items of a JSON list that `Source.json` read, as they are written."""
    items = []
    at = _after_space(written, 1)
    while written[at] != "]":
        _, end = _DECODER.raw_decode(written, at)
        items.append(written[at:end])
        at = _after_comma(written, end)
    return items


def _after_comma(written: str, at: int) -> int:
    at = _after_space(written, at)
    return _after_space(written, at + 1) if written[at] == "," else at


def _after_space(written: str, at: int) -> int:
    while written[at] in SPACES:
        at += 1
    return at


def _held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many last characters may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class _Spacing:
    """Leaves out the white space around calls."""

    def __init__(self) -> None:
        self._held = ""
        self._content = False
        self._calls = False

    def apply(self, pieces: Iterator[str | ToolCall]) -> Iterator[str | ToolCall]:
        """The pieces, white space kept back until it is known what it stands between."""
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._calls = True
                yield piece
                continue
            text = self._held + piece
            body = text.rstrip(SPACES)
            self._held = text[len(body) :]
            if body:
                if self._calls and not self._content:
                    body = body.lstrip(SPACES)
                self._content = True
                yield body

    def finish(self) -> Iterator[str]:
        """The white space at the end of a text without calls."""
        if self._held and not self._calls:
            yield self._held
