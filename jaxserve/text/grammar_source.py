"""From a client's constraint to a grammar in llguidance's own form."""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.core import StructuredOutputs

BLANKS = r"[ \t\n\r]{1,32}"
"""Blanks between the parts of a JSON document, if any. Bounded: a model that likes blanks would write nothing else."""


def grammar_source(wanted: StructuredOutputs) -> str:
    """The grammar; whether it can be followed is not known yet.

    Raises:
      ValueError: naming the field and what is wrong with it.
    """
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # A terminal, so that thousands of texts are one automaton and not thousands of rules.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, wanted.choice)))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    return _json_source(wanted)


def _as_lark(grammar: str) -> str:
    try:
        return str(any_to_lark(grammar))
    except RecursionError:
        raise ValueError("structured_outputs.grammar is nested too deeply") from None
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"structured_outputs.grammar is neither Lark (with a rule start) nor GBNF: {error}") from None


def _json_source(wanted: StructuredOutputs) -> str:
    text = '{"type": "object"}' if wanted.json is None else str(wanted.json)
    schema = _parsed(text)
    if schema is True:
        text = "{}"
    elif schema is False:
        raise ValueError("structured_outputs.json is the schema false, which no document meets")
    elif not isinstance(schema, dict):
        raise ValueError(f"structured_outputs.json must be a JSON schema, an object; got {type(schema).__name__}")
    if wanted.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    if wanted.whitespace_pattern is not None:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": wanted.whitespace_pattern})
    # llguidance's extension, by which a schema may itself say what blanks it takes.
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    if isinstance(own, dict) and ("whitespace_flexible" in own or "whitespace_pattern" in own):
        return LLMatcher.grammar_from_json_schema(text)
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": BLANKS})


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is no JSON: {error}") from None
