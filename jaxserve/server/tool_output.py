"""How an output of a request with tools is read: contents and calls, piece by piece as they come."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER, TOOL_CALL_PARSERS
from jaxserve.server.engine_api import TokenizerApi
from jaxserve.server.errors import ApiError
from jaxserve.server.tools import ToolUse
from jaxserve.text.tool_calls import PARSERS, ToolCall, ToolParser, detect_parser

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


class ToolReading:
    """How the outputs of one request are read.

    Args:
      tokenizer: of the model.
      parser_setting: a parser's name, or "auto".
      use: what the request lets the model call; None: nothing, so all text is content.

    Raises:
      ApiError: 400; the model's way to write calls is not known, or the choice cannot be enforced.
    """

    def __init__(self, tokenizer: TokenizerApi, parser_setting: str, use: ToolUse | None) -> None:
        self._use = use
        self._parser: type[ToolParser] | None = None
        self.sampling: dict[str, Any] = {}
        """What reading needs of `SamplingParams`."""
        if use is None:
            return
        if use.choice != "auto":
            what = "required" if use.choice == "required" else "with a function's name"
            message = f"tool_choice {what} needs structured output, which this server does not have; use auto or none"
            raise ApiError("invalid", message, param="tool_choice")
        self._parser = _parser_class(tokenizer, parser_setting)
        shown = {tokenizer.token_id(token) for token in self._parser.SPECIAL_TOKENS} & tokenizer.special_ids
        self.sampling["shown_special_ids"] = frozenset(shown)

    def output(self) -> OutputReader:
        """A reader for one choice."""
        if self._use is None or self._parser is None:
            return OutputReader(None)
        return OutputReader(self._parser(self._use.schemas), self._use.parallel)


class OutputReader:
    """Reads one choice's text.

    Args:
      parser: None: all text is content.
      parallel: False: calls after the first are left out.
    """

    def __init__(self, parser: ToolParser | None, parallel: bool = True) -> None:
        self.num_calls = 0
        """Calls seen so far."""
        self._parser = parser
        self._parallel = parallel

    def feed(self, text: str, last: bool) -> list[Piece]:
        """What `text` completes.

        Args:
          last: nothing follows.
        """
        if self._parser is None:
            return [Content(text)] if text else []
        found = self._parser.feed(text)
        if last:
            found += self._parser.finish()
        pieces: list[Piece] = []
        for part in found:
            pieces += self._call(part) if isinstance(part, ToolCall) else [Content(part)]
        return pieces

    def _call(self, call: ToolCall) -> list[Piece]:
        if self.num_calls and not self._parallel:
            return []
        index = self.num_calls
        self.num_calls += 1
        assert self._parser is not None, "calls come from a parser"
        return [CallStart(index, _call_id(*self._parser.CALL_IDS), call.name), CallArguments(index, call.arguments)]

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """The choice's reason to end, which is its calls if it ended by itself."""
        return "tool_calls" if self.num_calls and finish_reason == "stop" else finish_reason


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


def _parser_class(tokenizer: TokenizerApi, setting: str) -> type[ToolParser]:
    name: str | None = setting
    if setting == AUTO_TOOL_CALL_PARSER:
        forms = tokenizer.tool_forms
        name = None if forms is None else detect_parser(forms.source)
    if name is None:
        message = (
            "tools are not available: the chat template does not tell how this model writes calls;"
            f" start the server with --tool_call_parser set to one of {', '.join(TOOL_CALL_PARSERS)}"
        )
        raise ApiError("invalid", message, param="tools")
    return PARSERS[name]


def _call_id(prefix: str, size: int) -> str:
    return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(size))
