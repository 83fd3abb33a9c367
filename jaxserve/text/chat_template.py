"""Chat templates: the model's own Jinja template, rendered in a sandbox.

A template comes with the model and runs on the server, so it runs in Jinja's immutable sandbox, under the limits of
`template_limits`. A model without a template has no chat format: it is refused rather than guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from jaxserve.text.template_limits import TemplateLimitError, budgeted
from jaxserve.text.template_sandbox import LimitedEnvironment

MAX_SOURCE_CHARS = 1 << 18
_MAX_QUOTED_CHARS = 1000
_CONTENT_END = "\ue000end of content\ue001"


class ChatTemplateError(ValueError):
    """The conversation does not fit the model's chat template, or there is none."""


class ChatTemplateLimitError(ChatTemplateError):
    """A rendering reached a limit of `template_limits`."""


class _RaisedByTemplate(Exception):
    """`raise_exception` was called in a template."""


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's part for training; for serving, only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles `source`.

        Args:
          source: Jinja text.
          special_tokens: names such as `bos_token` and `eos_token`, seen by the template as variables.

        A source that is not valid Jinja is an error of `render`: the model still completes plain prompts.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template: jinja2.Template | None = None
        self._fault = ""
        if len(source) > MAX_SOURCE_CHARS:
            self._fault = f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}"
            return
        try:
            self._template = environment.from_string(source)
        except (
            Exception
        ) as error:  # what is nested too deeply ends in several kinds, of Jinja's and of Python's compiler
            self._fault = _shortened(error)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        Args:
          messages: dicts with at least `role`; passed on as they are.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: function descriptions for templates that know them.
          **variables: more template variables.

        Raises:
          ChatTemplateError: the template refused the conversation; the message quotes it. Or it is not valid, or
            (`ChatTemplateLimitError`) costs too much.
        """
        if self._template is None:
            raise ChatTemplateError(f"the model's chat template is not valid: {self._fault}")
        values = {
            **self._special_tokens,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with budgeted(num_chars(values)):
                return self._template.render(values)
        except TemplateLimitError as error:
            raise ChatTemplateLimitError(
                f"the model's chat template reached a limit with these messages: {error}"
            ) from None
        except RecursionError:
            raise ChatTemplateLimitError(
                "the model's chat template reached a limit with these messages: it calls itself too deeply"
            ) from None
        except _RaisedByTemplate as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {_shortened(error)}") from error
        except Exception as error:  # whatever a template does with a client's data is the client's mistake
            raise ChatTemplateError(
                f"the messages do not fit the model's chat template: {type(error).__name__}: {_shortened(error)}"
            ) from error

    def render_open(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """The conversation as text up to the end of the last message's content, for a model to continue it.

        Raises:
          ChatTemplateError: see `render`; or the template writes that content not once.
        """
        *earlier, last = messages
        marked = {**last, "content": f"{last['content']}{_CONTENT_END}"}
        text = self.render([*earlier, marked], False, tools, **variables)
        if text.count(_CONTENT_END) != 1:
            raise ChatTemplateError(
                "continue_final_message is not possible: the model's chat template does not write the last message's"
                " content exactly once"
            )
        return text[: text.index(_CONTENT_END)]


def num_chars(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return total


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_QUOTED_CHARS else text[: _MAX_QUOTED_CHARS - 3] + "..."


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def named_templates(value: Any) -> dict[str, str]:
    """Templates by name from a config's `chat_template`: a string, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value if isinstance(item, dict) and "template" in item}
    return {}
