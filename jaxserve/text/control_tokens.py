"""Special tokens stay out of a chat's text: what a client wrote as `<|im_end|>` is these characters, never the token.

A rendered chat is one string, in which the template's own special tokens and a client's text that looks like one are
alike. So what clients wrote is looked at before. Mostly none of it holds the text of a special token, and the
rendered string is encoded as it is. Otherwise

1. a mark, a character that nothing else of the request holds, breaks each such text, and follows a text that ends like
   the beginning of one: `<|im_end|>` becomes `<` mark `|im_end|>`;
2. the template renders. Special tokens that are whole in the result are the template's, and are spelled otherwise
   from here on, in a way that nobody can guess; the marks are taken out;
3. the result is encoded with a copy of the tokenizer that knows special tokens by those spellings alone.

Everything between special tokens goes through the same pipeline as ever, so texts without one get the same ids either
way. Special tokens are those that the tokenizer marks so, the ones that begin or end a text, and added tokens written
as such are: `<|...|>`. Other added tokens, as `<think>` or `<tool_call>` mostly are, are part of what models write and
read, and are found in every text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from jaxserve.text.template_limits import check_not_quick

_WRITTEN_AS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_turn>", re.DOTALL)
_MARKS = range(0xF0000, 0xFFFFE)
"""Code points of a private plane: no text means anything by them."""
_ROLE = re.compile(r"[a-z_]{1,32}")


class ControlTokens:
    """The special tokens of a tokenizer; thread-safe.

    Args:
      backend: the pipeline.
      ids: of tokens that are special whatever the pipeline says.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ids: Collection[int]) -> None:
        self._backend = backend
        self._added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        specials = [
            token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if len(token.content) > 1
            and (token.special or token_id in ids or _WRITTEN_AS_SPECIAL.fullmatch(token.content))
        ]
        self._contents = {token.content for token in specials}
        self._pattern = _any_of(self._contents)
        self._added_pattern = _any_of(self._added)
        self._heads = tuple(sorted({content[:2] for content in self._contents}))
        self._starts = frozenset(
            content[:size] for content in self._contents if not content[0].isalnum() for size in range(1, len(content))
        )
        self._firsts = tuple(sorted({start[0] for start in self._starts}))
        self._longest_start = max(map(len, self._starts), default=0)
        self._normalizes = backend.normalizer is not None and any(token.normalized for token in specials)
        self._lock = threading.Lock()
        self._careful: tuple[tokenizers.Tokenizer, dict[str, str]] | None = None

    def marked(self, values: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Values of a client's with marks, and the mark; None where none is needed.

        A message's own role is a word that templates compare, and stays as it is, though a special token be spelled so.
        """
        bare = {name: _without_roles(value) if name == "messages" else value for name, value in values.items()}
        if not self._contents or not any(self._is_suspect(text) for value in bare.values() for text in _texts(value)):
            return None
        texts = list(_texts(values))
        mark = next(
            each for each in map(chr, _MARKS) if not any(form in text for form in _written(each) for text in texts)
        )
        marked = {name: self._with_marks(value, mark) for name, value in bare.items()}
        for message, original in zip(marked["messages"], values["messages"], strict=True):
            if _has_role(original):
                message["role"] = original["role"]
        return marked, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Ids of a text that was rendered of marked values.

        Raises:
          ValueError: this tokenizer has no copy that tells special tokens from text.
        """
        careful, spellings = self._copy()
        text = self._added_pattern.sub(lambda found: spellings.get(found[0], found[0]), text)
        for written in _written(mark):
            text = text.replace(written, "")
        return list(careful.encode_batch([text], add_special_tokens=False)[0].ids)

    def _is_suspect(self, text: str) -> bool:
        if self._ends_like_one(text) or self._holds_one(text):
            return True
        return self._normalizes and self._holds_one(self._backend.normalizer.normalize_str(text))

    def _holds_one(self, text: str) -> bool:
        return any(head in text for head in self._heads) and self._pattern.search(text) is not None

    def _ends_like_one(self, text: str) -> bool:
        tail = text[-self._longest_start :]
        for first in self._firsts:
            at = tail.find(first)
            while at >= 0:
                if tail[at:] in self._starts:
                    return True
                at = tail.find(first, at + 1)
        return False

    def _with_marks(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            while self._pattern.search(value):
                value = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
            return value + mark if self._ends_like_one(value) else value
        if isinstance(value, Mapping):
            return {self._with_marks(key, mark): self._with_marks(inner, mark) for key, inner in value.items()}
        return [self._with_marks(inner, mark) for inner in value] if isinstance(value, list | tuple) else value

    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The tokenizer that knows special tokens by other spellings, and those; made once."""
        if self._careful is None:
            check_not_quick()  # it takes a second with a large vocabulary
            with self._lock:
                if self._careful is None:
                    self._careful = self._respelled()
        return self._careful

    def _respelled(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        secret = secrets.token_hex(8)
        spellings = {content: f"<{secret}:{self._added[content]}>" for content in self._contents}
        described = json.loads(self._backend.to_str())
        described["post_processor"] = None
        for added in described["added_tokens"]:
            if added["content"] in spellings:
                added |= {"content": spellings[added["content"]], "single_word": False}
        _respell(described["model"], self._added, spellings, secret)
        try:
            careful = tokenizers.Tokenizer.from_str(json.dumps(described))
        except Exception as error:  # the Rust library raises plain Exception
            raise ValueError(_not_possible(str(error))) from error
        for content, token_id in self._added.items():
            found = careful.token_to_id(spellings.get(content, content))
            if found != token_id:
                raise ValueError(_not_possible(f"token {token_id} became {found}"))
        return careful, spellings


def _respell(model: dict[str, Any], added: Mapping[str, int], spellings: Mapping[str, str], secret: str) -> None:
    """Takes special tokens out of a model's own vocabulary, which has every added token under its id afterwards.

    So no text is merged to one, and no id is given anew.
    """
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with scores, by id
        lowest = min((score for _, score in vocabulary), default=0.0)
        for number in range(len(vocabulary), max(added.values(), default=-1) + 1):
            vocabulary.append([f"<{secret}:unused{number}>", lowest])
        for content, token_id in added.items():
            vocabulary[token_id] = [spellings.get(content, content), vocabulary[token_id][1]]
        return
    for content, token_id in added.items():
        vocabulary.pop(content, None)
        vocabulary[spellings.get(content, content)] = token_id
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not spellings.keys() & _parts(merge)]
    if model.get("unk_token") in spellings:
        model["unk_token"] = spellings[model["unk_token"]]


def _parts(merge: Any) -> set[str]:
    """What a merge takes, and what it makes."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def _written(mark: str) -> tuple[str, str, str]:
    """A mark as it is, and as JSON and Python write it in the text of a list or mapping."""
    return mark, json.dumps(mark)[1:-1], repr(mark)[1:-1]


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Finds them as the tokenizer does: the first, of several the longest."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value; keys too."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            left += item
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item


def _has_role(message: Mapping[str, Any]) -> bool:
    """Whether its role is a word; the server lets only those through that it knows."""
    role = message.get("role")
    return isinstance(role, str) and _ROLE.fullmatch(role) is not None


def _without_roles(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with an empty role where it is a word."""
    return [{**message, "role": ""} if _has_role(message) else message for message in messages]


def _not_possible(why: str) -> str:
    return f"messages hold the text of a special token, which this tokenizer cannot encode as text ({why[:200]})"
