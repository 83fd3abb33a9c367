"""Tokenizer: text to ids, ids to text, chat messages to ids.

Wraps a `tokenizers` pipeline for encoding. Decoding does not use it: the bytes of every token are worked out
once, and text is the UTF-8 decoding of their concatenation, so that whole and streamed decoding agree exactly.
Two families are known: byte-level BPE (GPT-2's byte alphabet) and SentencePiece (`▁` for space, `<0xNN>` bytes).
Thread-safe: nothing changes after construction, save what is found out once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import tokenizers

from jaxserve.core import UnsupportedModelError
from jaxserve.faults import failpoint
from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.text.control_tokens import ControlTokens
from jaxserve.text.tool_forms import ToolForms, find_tool_forms

_RELEASE_GIL_CHARS = 1024  # encode() holds the interpreter lock, encode_batch() does not but costs a thread hop
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class Tokenizer:
    """A model's vocabulary, special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Takes over `backend`.

        Args:
          backend: a `tokenizers` pipeline whose decoder is byte-level or SentencePiece.
          bos_id: beginning-of-sequence id, None when the model has none.
          eos_ids: ids that end a generation, in the model's order.
          adds_bos: encode() puts BOS in front; None: as the pipeline does.
          chat_templates: Jinja sources by name; "default" is the chat template.
          special_tokens: `bos_token`, `eos_token`, ... for templates.

        Raises:
          UnsupportedModelError: the decoder is of neither known family.
        """
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self._pipeline_adds_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
        self.adds_bos = bos_id is not None and (self._pipeline_adds_bos if adds_bos is None else adds_bos)
        self._special_tokens = dict(special_tokens or {})
        self._set_templates(chat_templates or {})
        control_ids = {*self.eos_ids} if bos_id is None else {bos_id, *self.eos_ids}
        self._controls: ControlTokens | None = ControlTokens(backend, control_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes, self.strips_first_space = _vocabulary_bytes(backend)

    def _set_templates(self, sources: Mapping[str, str]) -> None:
        self.chat_template: str | None = sources.get("default")
        self._templates = {name: ChatTemplate(text, self._special_tokens) for name, text in sources.items()}

    def with_special_tokens_in_chat(self) -> Tokenizer:
        """The same tokenizer, which finds special tokens in messages too."""
        other = copy(self)
        other._controls = None
        return other

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with this Jinja template and no other."""
        other = copy(self)
        other._set_templates({"default": source})
        return other

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name."""
        return {name: template.source for name, template in self._templates.items()}

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... as templates know them."""
        return dict(self._special_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows: all are below this. A model's own vocabulary may be padded beyond it."""
        return len(self._token_bytes)

    def to_json(self) -> str:
        """The pipeline as a tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in it are recognised.

        Raises:
          ValueError: `text` holds a lone surrogate.
        """
        failpoint("tokenizer.encode")
        try:
            if len(text) < _RELEASE_GIL_CHARS:
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(_not_text(text)) from error
        if add_special_tokens and self.adds_bos != self._pipeline_adds_bos:
            return self._with_bos(ids) if self.adds_bos else self._without_bos(ids)
        return list(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id is negative.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token stands for; b"" for ids of a model's padding beyond the tokenizer's vocabulary.

        Raises:
          ValueError: the id is negative.
        """
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; ids start at 0")
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """A token's own text; U+FFFD stands for bytes that are part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of a vocabulary entry as it is written in the vocabulary, e.g. a special token's name."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Messages as the model's chat template writes them.

        Args:
          messages: arguments of their `tool_calls` are JSON text; the template gets them as it wants them.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: function descriptions; a template of their own is used for them where the model has one.
          continue_final_message: end with the last message's content, its turn left open; nothing is added.

        Raises:
          ChatTemplateError: there is no template, or it refused the messages.
        """
        template, fitted = self._fitted(messages, tools)
        return _rendered(template, fitted, add_generation_prompt, tools, continue_final_message, variables)

    def _fitted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[ChatTemplate, Sequence[Mapping[str, Any]]]:
        """The template for messages, and the messages as it wants them."""
        with_calls = any(message.get("tool_calls") for message in messages)
        template = self._tool_template if tools or with_calls else self._templates.get("default")
        if template is None:
            raise ChatTemplateError(
                "the model has no chat template; use /v1/completions with a prompt in the model's own format"
            )
        return template, self.tool_forms.fit(messages) if with_calls and self.tool_forms is not None else messages

    @property
    def _tool_template(self) -> ChatTemplate | None:
        return self._templates.get("tool_use") or self._templates.get("default")

    @cached_property
    def tool_forms(self) -> ToolForms | None:
        """What the model's template for tools does with them; None: there is no template."""
        template = self._tool_template
        return None if template is None else find_tool_forms(template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Ids of the rendered chat, with exactly one BOS where the template or the tokenizer wants one.

        Special tokens are the template's alone, see `control_tokens`, unless the tokenizer was told otherwise.

        Raises:
          ChatTemplateError: see `render_chat`.
        """
        template, fitted = self._fitted(messages, tools)
        given: dict[str, Any] = {"messages": fitted, "tools": tools, "variables": variables}
        marked = self._controls.marked(given) if self._controls is not None else None
        if marked is not None:
            given, mark = marked
        text = _rendered(
            template,
            given["messages"],
            add_generation_prompt,
            given["tools"],
            continue_final_message,
            given["variables"],
        )
        if marked is None:
            ids = self.encode(text, add_special_tokens=False)
        else:
            assert self._controls is not None
            ids = self._controls.encode(text, mark)
        return self._with_bos(ids) if self.adds_bos else ids

    def _with_bos(self, ids: Sequence[int]) -> list[int]:
        assert self.bos_id is not None, "adds_bos needs a bos_id"
        return list(ids) if list(ids[:1]) == [self.bos_id] else [self.bos_id, *ids]

    def _without_bos(self, ids: Sequence[int]) -> list[int]:
        return list(ids[1:]) if list(ids[:1]) == [self.bos_id] else list(ids)


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    if continue_final_message:
        return template.render_open(messages, tools, **variables)
    return template.render(messages, add_generation_prompt, tools, **variables)


def _not_text(text: object) -> str:
    if not isinstance(text, str):
        return f"text is a {type(text).__name__}; it must be a string"
    at = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return f"text holds a lone surrogate U+{ord(text[at]):04X} at character {at}; it must be valid Unicode"


def _vocabulary_bytes(backend: tokenizers.Tokenizer) -> tuple[list[bytes], bool]:
    """The bytes of every id, and whether a text's first space is dropped when decoding.

    Raises:
      UnsupportedModelError: the decoder is neither byte-level nor SentencePiece.
    """
    decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    steps = _flat(decoder)
    kinds = [step["type"] for step in steps]
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        for token, token_id in vocabulary.items():
            table[token_id] = _byte_level_bytes(token, alphabet)
        strips = False
    elif _is_sentencepiece(steps):
        bytes_known = "ByteFallback" in kinds
        for token, token_id in vocabulary.items():
            byte = _BYTE_TOKEN.fullmatch(token) if bytes_known else None
            table[token_id] = (
                bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")
            )
        strips = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
    else:
        raise UnsupportedModelError(
            f"the tokenizer's decoder is {kinds or None}; supported are byte-level BPE (ByteLevel) and"
            " SentencePiece (Metaspace, or Replace of ▁ with ByteFallback)"
        )
    for token_id, content in added.items():
        table[token_id] = content.encode("utf-8", "replace")
    return table, strips


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    return any(
        step["type"] == "Metaspace"
        or (step["type"] == "Replace" and step.get("pattern", {}).get("String") == _SPACE_MARK)
        for step in steps
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _byte_level_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # added tokens may be plain text
        return token.encode("utf-8", "replace")
