"""Text that is read while it arrives: the words a tool call's grammar is written in.

Each reading is a generator that yields while it needs more text and returns what it read, so a format is one
function for whole and for streamed text. A reading fails at the first character that cannot belong to it, which
keeps back no text longer than a call needs.
"""

from __future__ import annotations

import re
from collections.abc import Generator

type Reading[T] = Generator[None, None, T]

MAX_DEPTH = 64
"""Deepest nesting of a call's arguments."""
SPACES = " \t\r\n"
_STRING_PART = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ATOM_PART = re.compile(r"[-+.0-9A-Za-z]*")
_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD_PART = re.compile(r"[\w.:/-]*")


class MalformedCallError(Exception):
    """The text is no call of the format."""


class Source:
    """What has arrived of a text.

    Attributes:
      text: all of it so far.
      at: how far it has been read.
      complete: nothing follows.

    Args:
      absent: marks that a complete text does not hold from here on; shared by the sources of one text.
    """

    def __init__(self, text: str, absent: set[str] | None = None) -> None:
        self.text = text
        self._absent = set() if absent is None else absent
        self.at = 0
        self.complete = False

    def more(self) -> Reading[None]:
        """Waits for text; raises MalformedCallError when there will be none."""
        if self.complete:
            raise MalformedCallError
        yield

    def peek(self) -> Reading[str]:
        """The next character, left unread."""
        while self.at == len(self.text):
            yield from self.more()
        return self.text[self.at]

    def space(self) -> Reading[None]:
        """Reads white space, if there is any."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in SPACES:
                self.at += 1
            if self.at < len(self.text) or self.complete:
                return
            yield

    def accepts(self, word: str) -> Reading[bool]:
        """Reads `word` if it is what follows."""
        while True:
            piece = self.text[self.at : self.at + len(word)]
            if piece == word:
                self.at += len(word)
                return True
            if self.complete or not word.startswith(piece):
                return False
            yield

    def literal(self, word: str) -> Reading[None]:
        """Reads `word`; nothing else may follow."""
        if not (yield from self.accepts(word)):
            raise MalformedCallError

    def until(self, mark: str) -> Reading[str]:
        """Reads up to `mark` and over it; returns what is before it."""
        if mark in self._absent:
            raise MalformedCallError
        start = searched = self.at
        while (found := self.text.find(mark, searched)) < 0:
            searched = max(start, len(self.text) - len(mark) + 1)
            if self.complete:
                self._absent.add(mark)
            yield from self.more()
        self.at = found + len(mark)
        return self.text[start:found]

    def word(self) -> Reading[str]:
        """Reads a function's name: letters, digits and any of `_.:/-`; "" where there is none."""
        return (yield from self._run(_WORD_PART))

    def json(self) -> Reading[str]:
        """Reads white space and one JSON value; returns the value as it is written."""
        yield from self.space()
        start = self.at
        closers: list[str] = []
        while True:
            yield from self.space()
            char = yield from self.peek()
            if char in "{[":
                if len(closers) == MAX_DEPTH:
                    raise MalformedCallError
                self.at += 1
                closers.append("}" if char == "{" else "]")
                yield from self.space()
                if (yield from self.peek()) != closers[-1]:
                    if char == "{":
                        yield from self._json_key()
                    continue
            elif char == '"':
                yield from self._json_string()
            elif not _ATOM.fullmatch((yield from self._run(_ATOM_PART))):
                raise MalformedCallError
            if not (yield from self._json_goes_on(closers)):
                return self.text[start : self.at]

    def _json_goes_on(self, closers: list[str]) -> Reading[bool]:
        """Reads what follows a value, up to the next one; False when the outermost has ended."""
        while closers:
            yield from self.space()
            char = yield from self.peek()
            self.at += 1
            if char == closers[-1]:
                closers.pop()
            elif char == ",":
                if closers[-1] == "}":
                    yield from self._json_key()
                return True
            else:
                raise MalformedCallError
        return False

    def _json_key(self) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) != '"':
            raise MalformedCallError
        yield from self._json_string()
        yield from self.space()
        yield from self.literal(":")

    def _json_string(self) -> Reading[None]:
        self.at += 1
        while True:
            self.at = _matched(_STRING_PART, self.text, self.at)
            if self.at == len(self.text):
                yield from self.more()
                continue
            if self.text[self.at] == '"':
                self.at += 1
                return
            while (escape := _ESCAPE.match(self.text, self.at)) is None:
                if not _ESCAPE_START.fullmatch(self.text, self.at):
                    raise MalformedCallError
                yield from self.more()
            self.at = escape.end()

    def _run(self, part: re.Pattern[str]) -> Reading[str]:
        """Reads all that `part` matches, to the character that ends it."""
        start = self.at
        while True:
            self.at = _matched(part, self.text, self.at)
            if self.at < len(self.text) or self.complete:
                return self.text[start : self.at]
            yield


def _matched(part: re.Pattern[str], text: str, at: int) -> int:
    """Where the match of a pattern that matches "" too ends."""
    match = part.match(text, at)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
