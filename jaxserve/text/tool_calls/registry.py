"""Tool parsers by name, and which of them reads what a chat template teaches."""

from __future__ import annotations

from jaxserve.text.tool_calls.deepseek_v3 import DeepseekV3Parser
from jaxserve.text.tool_calls.granite import GraniteParser
from jaxserve.text.tool_calls.hermes import HermesParser
from jaxserve.text.tool_calls.llama3_json import Llama3JsonParser
from jaxserve.text.tool_calls.mistral import MistralParser
from jaxserve.text.tool_calls.parser import ToolParser
from jaxserve.text.tool_calls.pythonic import PythonicParser
from jaxserve.text.tool_calls.qwen3_coder import Qwen3CoderParser

PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepseekV3Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
"""By the names that vLLM gives them."""

_TAUGHT_BY: tuple[tuple[str, str | None], ...] = (
    ("<arg_key>", None),  # GLM: its own tags within <tool_call>
    ("<seed:tool_call>", None),  # Seed-OSS: <function= within tags of its own
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
"""What a template says only for that format, None being one without a parser; the first that is found decides."""


def detect_parser(chat_template: str) -> str | None:
    """Name of the parser for models with this template; None: it teaches no format that is known."""
    return next((name for mark, name in _TAUGHT_BY if mark in chat_template), None)
