"""Logprobs in OpenAI's two shapes (completions and chat), and in vLLM's for prompts.

Per position the engine gives id -> Logprob: the chosen token and the alternatives asked for. Both
shapes list alternatives likeliest first. JSON has no minus infinity: it becomes -9999.0, as vLLM does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxserve.core import Logprob
from jaxserve.server.engine_api import TokenizerApi, TokenLogprobs
from jaxserve.text.detokenizer import IncrementalDetokenizer

LOWEST = -9999.0


def token_string(tokenizer: TokenizerApi, token_id: int) -> str:
    """A token's own text; for a token that is part of a character its bytes, as `bytes:\\xf0\\x9f`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token_id)


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completions choice, delta by delta.

    `text_offset` is how much of the choice's text was delivered before each token, so it runs on over deltas;
    the tokens of one character share its start.

    Args:
      prompt_token_ids: what the choice continues.
      skip_special_tokens: as in the request.
      echo: the prompt's text when it is part of the choice's; its tokens then come first.
    """

    def __init__(
        self,
        tokenizer: TokenizerApi,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        echo: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._echo_offsets = deque(() if echo is None else _echo_offsets(tokenizer, prompt_token_ids, echo))
        self._offset = len(echo or "")

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object of these tokens; a None (a prompt's first token) gives nulls."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, logprobs, strict=True):
            text = token_string(self._tokenizer, token_id)
            tokens.append(text)
            if self._echo_offsets:
                offsets.append(self._echo_offsets.popleft())
            else:
                offsets.append(self._offset)
                self._offset += len(self._detokenizer.add(token_id))
            if position is None:
                chosen.append(None)
                top.append(None)
                continue
            chosen.append(_finite(position[token_id].logprob))
            alternatives: dict[str, float] = {}
            for other, logprob in _likeliest_first(position):
                # Ids may share a text; the likeliest of them keeps it.
                alternatives.setdefault(token_string(self._tokenizer, other), _finite(logprob.logprob))
            top.append(alternatives)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _echo_offsets(tokenizer: TokenizerApi, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of an echoed prompt starts in its text."""
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    offsets, offset = [], 0
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(detokenizer.add(token_id))
    # A BOS that the tokenizer put in front of a text is no part of it.
    surplus = offset + len(detokenizer.flush()) - len(text)
    return [min(max(start - surplus, 0), len(text)) for start in offsets]


def chat_logprobs(
    tokenizer: TokenizerApi, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Chat's `logprobs` object: per token its own entry and the `num_top` likeliest."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        entry = _chat_entry(tokenizer, token_id, position[token_id])
        likeliest = _likeliest_first(position)[:num_top]
        entry["top_logprobs"] = [_chat_entry(tokenizer, other, logprob) for other, logprob in likeliest]
        content.append(entry)
    return {"content": content, "refusal": None}


def narrowed(
    positions: Sequence[TokenLogprobs | None] | None, token_ids: Sequence[int], count: int
) -> list[TokenLogprobs | None]:
    """Of each position the token of `token_ids` and the `count` likeliest; positions may hold more."""

    def kept(token_id: int, position: TokenLogprobs) -> TokenLogprobs:
        return {
            other: entry
            for other, entry in position.items()
            if other == token_id or (entry.rank is not None and entry.rank <= count)
        }

    return [
        None if position is None else kept(token_id, position)
        for token_id, position in zip(token_ids, positions or (), strict=False)
    ]


def prompt_logprobs(
    positions: Sequence[TokenLogprobs | None] | None, token_ids: Sequence[int], count: int
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: per position id -> logprob, rank and text, of the token and the `count` likeliest.

    The first is null.
    """
    if positions is None:
        return None
    return [
        None if position is None else _prompt_position(position) for position in narrowed(positions, token_ids, count)
    ]


def _prompt_position(position: TokenLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in _likeliest_first(position)
    }


def _chat_entry(tokenizer: TokenizerApi, token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token": token_string(tokenizer, token_id),
        "logprob": _finite(logprob.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _likeliest_first(position: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
