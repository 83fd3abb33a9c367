"""How an output of a request with tools is read: contents and calls, piece by piece as they come."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER, TOOL_CALL_PARSERS
from jaxserve.core import StructuredOutputs
from jaxserve.server.engine_api import TokenizerApi
from jaxserve.server.errors import ApiError
from jaxserve.server.structured_fields import Constraint
from jaxserve.server.tools import ToolUse
from jaxserve.text.tool_calls import PARSERS, CallListParser, ToolCall, ToolParser, call_list_schema, detect_parser

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
      ApiError: 400; the model's way to write calls is not known.
    """

    def __init__(self, tokenizer: TokenizerApi, parser_setting: str, use: ToolUse | None) -> None:
        self._use = use
        self._parser: type[ToolParser] | None = None
        self._id_form = ToolParser.CALL_IDS
        self.sampling: dict[str, Any] = {}
        """What reading needs of `SamplingParams`."""
        if use is None:
            return
        native = _native_parser(tokenizer, parser_setting)
        if native is not None:
            self._id_form = native.CALL_IDS
        if self.is_forced:
            self._parser = CallListParser
            return
        if native is None:
            message = (
                "tools are not available: the chat template does not tell how this model writes calls;"
                f" start the server with --tool_call_parser set to one of {', '.join(TOOL_CALL_PARSERS)}"
            )
            raise ApiError("invalid", message, param="tools")
        self._parser = native
        shown = {tokenizer.token_id(token) for token in native.SPECIAL_TOKENS} & tokenizer.special_ids
        self.sampling["shown_special_ids"] = frozenset(shown)

    @property
    def has_tools(self) -> bool:
        """Whether outputs may have calls."""
        return self._use is not None

    @property
    def is_forced(self) -> bool:
        """Whether outputs must be calls, which `constraint` sees to."""
        return self._use is not None and self._use.choice != "auto"

    def constraint(self) -> Constraint | None:
        """What the output must be for the choice to be kept; None: anything."""
        use = self._use
        if use is None or not self.is_forced:
            return None
        if use.choice == "function":
            ((_, schema),) = use.schemas.items()
        else:
            schema = call_list_schema(use.schemas, use.parallel)
        return Constraint("tools", "tools", StructuredOutputs(json=schema or {"type": "object"}))

    def output(self) -> OutputReader:
        """A reader for one choice."""
        if self._use is None or self._parser is None:
            return OutputReader(None)
        if self._use.choice == "function":
            ((name, _),) = self._use.schemas.items()
            return ArgumentsReader(name, self._id_form)
        return OutputReader(self._parser(self._use.schemas), self._id_form, self._use.parallel)


class OutputReader:
    """Reads one choice's text.

    Args:
      parser: None: all text is content.
      id_form: see `ToolParser.CALL_IDS`.
      parallel: False: calls after the first are left out.
    """

    def __init__(
        self, parser: ToolParser | None, id_form: tuple[str, int] = ToolParser.CALL_IDS, parallel: bool = True
    ) -> None:
        self.num_calls = 0
        """Calls seen so far."""
        self._parser = parser
        self._parallel = parallel
        self._id_form = id_form

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
        return [CallStart(index, self._new_id(), call.name), CallArguments(index, call.arguments)]

    def _new_id(self) -> str:
        prefix, size = self._id_form
        return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(size))

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """The choice's reason to end, which is its calls if it ended by itself."""
        return "tool_calls" if self.num_calls and finish_reason == "stop" else finish_reason


class ArgumentsReader(OutputReader):
    """Reads an output that is the arguments of a function named beforehand.

    Args:
      name: the function's.
    """

    def __init__(self, name: str, id_form: tuple[str, int]) -> None:
        super().__init__(None, id_form)
        self._name = name

    def feed(self, text: str, last: bool) -> list[Piece]:
        """The call's beginning with the first text, then its arguments as they come."""
        pieces: list[Piece] = []
        if text and not self.num_calls:
            self.num_calls = 1
            pieces.append(CallStart(0, self._new_id(), self._name))
        return [*pieces, CallArguments(0, text)] if text else pieces


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


def _native_parser(tokenizer: TokenizerApi, setting: str) -> type[ToolParser] | None:
    """The parser of the model's own format; None: it is not known."""
    if setting != AUTO_TOOL_CALL_PARSER:
        return PARSERS[setting]
    forms = tokenizer.tool_forms
    name = None if forms is None else detect_parser(forms.source)
    return None if name is None else PARSERS[name]
