"""Llama 4, Llama 3.2 and others: the message is a list of Python calls, `[f(a=1, b="x"), g()]`.

The list stands at the message's beginning, or between `<|python_start|>` and `<|python_end|>`. Arguments are given by
name, as literals.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from jaxserve.text.tool_calls.parser import ToolCall, ToolParser
from jaxserve.text.tool_calls.source import MAX_DEPTH, MalformedCallError, Reading, Source

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """See the module."""

    MARKS = ("<|python_start|>",)
    FIRST = ("[",)
    SPECIAL_TOKENS = ("<|python_start|>", "<|python_end|>")

    def read(self, source: Source) -> Reading[list[ToolCall]]:
        """All calls of the list."""
        if (yield from source.accepts("<|python_start|>")):
            yield from source.space()
        start = source.at
        yield from source.literal("[")
        yield from source.space()
        if (yield from source.word()) not in self.tools:
            raise MalformedCallError
        yield from _skip_rest_of_list(source)
        calls = self._calls(source.text[start : source.at])
        yield from source.accepts("<|python_end|>")
        return calls

    def _calls(self, written: str) -> list[ToolCall]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes that Python does not know
                parsed = ast.parse(written, mode="eval").body
            if not isinstance(parsed, ast.List):  # a comprehension has the same brackets
                raise MalformedCallError
            return [self._call(item) for item in parsed.elts]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise MalformedCallError from None

    def _call(self, node: ast.expr) -> ToolCall:
        if not isinstance(node, ast.Call) or node.args:
            raise MalformedCallError
        arguments = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise MalformedCallError
            arguments[keyword.arg] = _value(keyword.value)
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # a lone surrogate, which no JSON answer can hold, is a ValueError
        return self.call(ast.unparse(node.func), written)


def _skip_rest_of_list(source: Source) -> Reading[None]:
    """Reads to the bracket that closes the list; brackets in strings do not count."""
    closers = ["]"]
    while closers:
        char = yield from source.peek()
        source.at += 1
        if char in _CLOSERS:
            if len(closers) > MAX_DEPTH:
                raise MalformedCallError
            closers.append(_CLOSERS[char])
        elif char == closers[-1]:
            closers.pop()
        elif char in ")]}":
            raise MalformedCallError
        elif char in "'\"":
            while (inner := (yield from source.peek())) != char:
                source.at += 1
                if inner == "\\":
                    yield from source.peek()
                    source.at += 1
            source.at += 1


def _value(node: ast.expr) -> Any:
    """The JSON value of a literal; raises MalformedCallError for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) != len(values):
                raise MalformedCallError
            return dict(zip(names, map(_value, values), strict=True))
    raise MalformedCallError
