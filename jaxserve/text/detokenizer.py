"""Incremental detokenising: token ids in, whole characters out.

Text is bytes until the last moment. A tokenizer knows the bytes of each of its tokens, so the text of a
sequence is the UTF-8 decoding of their concatenation, and a streaming UTF-8 decoder that keeps the bytes of
an unfinished character is an exact incremental form of it: constant time per token, whatever the history.

Rules:
- A delta never ends inside a character: bytes of an unfinished one wait for the next token.
- Deltas joined, `flush` included, equal decode(prompt + output) with the part that repeats decode(prompt)
  taken away. A character whose first bytes are the prompt's and whose last bytes are output counts as output.
- Bytes that are not UTF-8 become U+FFFD, as in `decode`.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

_LONGEST_CHARACTER = 4  # bytes
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The part of a tokenizer that detokenising needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text deltas; one object per sequence, not thread-safe."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown_special_ids: Collection[int] = (),
    ) -> None:
        """Starts after a prompt.

        Args:
          tokenizer: gives the bytes of a token and the special ids.
          prompt_token_ids: only the tail is looked at, for an unfinished character and to know whether text
            precedes the output.
          skip_special_tokens: special tokens give no text.
          shown_special_ids: these do all the same.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset[int]()
        self._decoder = _utf8_decoder("replace")
        tail = self._prompt_tail(prompt_token_ids)
        self._decoder.decode(tail)
        unfinished = self._decoder.getstate()[0]
        # decode(prompt) shows an unfinished character as U+FFFD, two of them where its bytes begin a surrogate, which
        # is no character; as many that take its place repeat it.
        self._repeated = unfinished.decode("utf-8", "replace")
        self._at_start = tokenizer.strips_first_space and not tail

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._deliver(self._decoder.decode(data))

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD for an unfinished character, else ""."""
        return self._deliver(self._decoder.decode(b"", final=True))

    def _deliver(self, text: str) -> str:
        if self._repeated and text:
            repeated, self._repeated = self._repeated, ""
            while repeated and not text.startswith(repeated):
                repeated = repeated[:-1]
            return text[len(repeated) :]
        return text

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's visible text, at least as many as a character can have, if it has them."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._tokenizer.token_bytes(token_id) + tail
                if len(tail) >= _LONGEST_CHARACTER:
                    break
        return tail
