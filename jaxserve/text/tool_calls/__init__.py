"""Tool calls in a model's text: one parser per family of models."""

from jaxserve.text.tool_calls.call_list import call_list_schema
from jaxserve.text.tool_calls.parser import ToolCall, ToolParser, is_json_object
from jaxserve.text.tool_calls.registry import PARSERS, detect_parser

__all__ = [
    "PARSERS",
    "ToolCall",
    "ToolParser",
    "call_list_schema",
    "detect_parser",
    "is_json_object",
]
