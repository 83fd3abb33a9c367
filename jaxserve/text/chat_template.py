"""Chat templates: the model's own Jinja template, rendered in a sandbox.

A template comes with the model and runs on the server, so it runs in Jinja's immutable sandbox. A model without
a template has no chat format: it is refused rather than guessed.
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
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTENT_END = "\ue000end of content\ue001"


class ChatTemplateError(ValueError):
    """The conversation does not fit the model's chat template, or there is none."""


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template: jinja2.Template | None = None
        self._syntax_error: jinja2.TemplateSyntaxError | None = None
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._syntax_error = error

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
          ChatTemplateError: the template refused the conversation; the message quotes it. Or it is not valid.
        """
        if self._template is None:
            raise ChatTemplateError(f"the model's chat template is not valid: {self._syntax_error}")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": [dict(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RaisedByTemplate as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        except Exception as error:  # whatever a template does with a client's data is the client's mistake
            raise ChatTemplateError(
                f"the messages do not fit the model's chat template: {type(error).__name__}: {error}"
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
