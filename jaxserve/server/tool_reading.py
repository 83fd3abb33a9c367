"""ToolReading: what a request's tools mean for its outputs: how they are constrained, and how they are read."""

from __future__ import annotations

from typing import Any

from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER, TOOL_CALL_PARSERS
from jaxserve.core import StructuredOutputs
from jaxserve.server.engine_api import TokenizerApi
from jaxserve.server.errors import ApiError
from jaxserve.server.output_reader import ArgumentsReader, CallListReader, OutputReader, ParserReader
from jaxserve.server.structured_fields import Constraint
from jaxserve.server.tools import ToolUse
from jaxserve.text.tool_calls import PARSERS, ToolParser, call_list_schema, detect_parser


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
        self._native: type[ToolParser] | None = None
        self._id_form = ToolParser.CALL_IDS
        self.sampling: dict[str, Any] = {}
        """What reading needs of `SamplingParams`."""
        if use is None:
            return
        self._native = native = _native_parser(tokenizer, parser_setting)
        if native is not None:
            self._id_form = native.CALL_IDS
        if self.is_forced:
            return
        if native is None:
            message = (
                "tools are not available: the chat template does not tell how this model writes calls;"
                f" start the server with --tool_call_parser set to one of {', '.join(TOOL_CALL_PARSERS)}"
            )
            raise ApiError("invalid", message, param="tools")
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
        use = self._use
        if use is None:
            return OutputReader()
        if use.choice == "function":
            ((name, _),) = use.schemas.items()
            return ArgumentsReader(name, self._id_form)
        if self.is_forced:
            return CallListReader(self._id_form)
        assert self._native is not None, "checked at the beginning"
        return ParserReader(self._native(use.schemas), use.parallel)


def _native_parser(tokenizer: TokenizerApi, setting: str) -> type[ToolParser] | None:
    """The parser of the model's own format; None: it is not known."""
    if setting != AUTO_TOOL_CALL_PARSER:
        return PARSERS[setting]
    forms = tokenizer.tool_forms
    name = None if forms is None else detect_parser(forms.source)
    return None if name is None else PARSERS[name]
