"""A tokenizer as GGUF metadata: the way back from `gguf_tokenizer`.

GGUF has no place for how text is cut before BPE, only names of ways that programs know. So the metadata is made with
one name after another and read back, and the one is taken whose ids agree on texts that the ways cut differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_from_metadata,
)
from jaxserve.text.tokenizer import Tokenizer

_PROBES = (
    "Hello world, it's 3 o'clock; we'LL see 12345 things in 2024-11-05.",
    "  two spaces,   three,\ttabs\t\tand\n\nlines\r\n   \n indented\n",
    "Café — naïve façade ½ ¾ A\u030a \uff12\uff13 😊 👩\u200d👧 ❤\ufe0f 日本語のテキスト 한국어 ไทย हिन्दी العربية",
    "camelCaseWORD XMLHttpRequest ÉCOLE Straße don't DON'T we've I'M y'all's",
    "def f(x):\n    return x**2 # ...!!! /path/to//file?a=b&c=%20\n\n\n\t}",
    "1 12 123 1234 12345678901 3.14e-10 0xFF \uff11\uff12\uff13 ٣٤٥",
    "",
    " ",
)


def gguf_vocabulary(tokenizer: Tokenizer, name: str, num_tokens: int) -> dict[str, Any]:
    """The metadata `tokenizer.*` of a tokenizer, without the ids of special tokens.

    Args:
      name: of the model, for messages.
      num_tokens: rows of the model's embedding; the list of tokens is filled up to them.

    Raises:
      UnsupportedModelError: it is no BPE, or none of the ways to cut text that GGUF names is its own.
    """
    pipeline = json.loads(tokenizer.to_json())
    model = pipeline["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModelError(
            f"{name}: a tokenizer of type {model.get('type')} cannot be written as GGUF; BPE can. Leave the tokenizer"
            " out with --tokenizer=none and serve with --tokenizer"
        )
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens = _tokens(pipeline, num_tokens)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if is_sentencepiece else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": _types(pipeline, tokens, is_sentencepiece),
        "tokenizer.ggml.add_bos_token": bool(tokenizer.adds_bos),
        **_templates(tokenizer),
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ways: list[dict[str, Any]]
    if is_sentencepiece:
        scores = _scores(tokens, merges)
        ways = [
            {"tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": each}
            for each in (True, False)
        ]
    else:
        own = {"tokenizer.ggml.merges": merges} if merges else {}
        ways = [{"tokenizer.ggml.pre": each, **own} for each in PRE_TOKENIZERS]
    for way in ways:
        if _agrees(tokenizer, name, found | way):
            return found | way
    raise UnsupportedModelError(
        f"{name}: no way to cut text that GGUF has a name for gives this tokenizer's ids; tried were"
        f" {', '.join(dict.fromkeys(str(way['tokenizer.ggml.pre']) for way in ways))}. Leave the tokenizer out with"
        " --tokenizer=none and serve with --tokenizer"
    )


def _agrees(tokenizer: Tokenizer, name: str, metadata: Mapping[str, Any]) -> bool:
    try:
        other = tokenizer_from_metadata(Path(name), metadata)
    except (CheckpointError, UnsupportedModelError):
        return False
    return all(
        other.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
        for text in _PROBES
    )


def _tokens(pipeline: Mapping[str, Any], num_tokens: int) -> list[str]:
    """Every token by its id; ids without one have a name that no text has."""
    by_id = {token_id: token for token, token_id in pipeline["model"]["vocab"].items()}
    by_id |= {added["id"]: added["content"] for added in pipeline.get("added_tokens") or []}
    return [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(max(max(by_id) + 1, num_tokens))]


def _types(pipeline: Mapping[str, Any], tokens: list[str], is_sentencepiece: bool) -> list[int]:
    types = [NORMAL] * len(tokens)
    if is_sentencepiece:
        types = [BYTE if len(token) == 6 and token.startswith("<0x") else NORMAL for token in tokens]
    for added in pipeline.get("added_tokens") or []:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = pipeline["model"].get("unk_token")
    if is_sentencepiece and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    known = {*pipeline["model"]["vocab"], *(added["content"] for added in pipeline.get("added_tokens") or [])}
    return [UNUSED if token not in known else own for token, own in zip(tokens, types, strict=True)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores that make SentencePiece merge in this order: the earlier a token is made, the higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [float(-ranks.get(token, 0)) for token in tokens]


def _templates(tokenizer: Tokenizer) -> dict[str, Any]:
    sources = tokenizer.chat_templates
    found: dict[str, Any] = {}
    if "default" in sources:
        found["tokenizer.chat_template"] = sources["default"]
    others = sorted(name for name in sources if name != "default")
    if others:
        found["tokenizer.chat_templates"] = others
        found |= {f"tokenizer.chat_template.{name}": sources[name] for name in others}
    return found
