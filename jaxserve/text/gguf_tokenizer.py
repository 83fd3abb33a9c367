"""Rebuilding a tokenizer from GGUF metadata.

Two kinds of vocabulary occur: byte-level BPE (`gpt2`), given by tokens and merges, and SentencePiece (`llama`),
given by tokens and scores. How text is cut before BPE is not in the file, only its name (`tokenizer.ggml.pre`);
an unknown name is refused, for a wrong cut gives other ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.gguf_config import special_token_ids
from jaxserve.loading.gguf_file import read_gguf
from jaxserve.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS_AND_SPACES}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _CASED_REST
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS: dict[str, str | tuple[str, ...]] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3,  # of OLMo 2 and Phi-4 too
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": _DEEPSEEK3,
}
"""By name; of several, each cuts what the ones before it left."""
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "deepseek-v3")
"""A name of each way to cut text."""
_GPT2 = ("gpt-2", "gpt2", "olmo", "phi-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")  # a word that is in the vocabulary is not merged up to
_NFC = ("qwen2", "deepseek-r1-qwen")
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """The tokenizer of a .gguf file.

    Raises:
      CheckpointError: the file is damaged or holds no vocabulary.
      UnsupportedModelError: a kind of vocabulary or pre-tokenizer that is not known.
    """
    return tokenizer_from_metadata(path, read_gguf(path).metadata)


def tokenizer_from_metadata(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    Args:
      path: of the file, for messages.

    Raises:
      CheckpointError, UnsupportedModelError: as `tokenizer_from_gguf`.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(path, metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens names a token twice; the file is damaged")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    if kind == "gpt2":
        merges = _strings(path, metadata, "merges") if "tokenizer.ggml.merges" in metadata else []
        backend = _byte_level(path, vocabulary, merges, pre)
        adds_bos = pre in _LLAMA3_NAMES
    elif kind == "llama":
        backend = _sentencepiece(path, vocabulary, metadata)
        adds_bos = True
    else:
        raise UnsupportedModelError(
            f"{path}: GGUF tokenizer {kind!r} is not supported; supported are gpt2 and llama."
            " Set tokenizer to the original model's tokenizer.json"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must hold one number per token")
    added = (CONTROL, USER_DEFINED, UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, special=token_type != USER_DEFINED, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in added and token
        ]
    )
    ids = special_token_ids(metadata)
    bos_id = _checked_id(path, ids.get("bos_token_id"), tokens)
    eos_ids = [_checked_id(path, eos, tokens) for eos in ids.get("eos_token_id", [])]
    # Files written before the end-of-turn key existed name only the end of text.
    eos_ids += [
        vocabulary[token] for token in _END_OF_TURN if token in vocabulary and types[vocabulary[token]] == CONTROL
    ]
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=[eos for eos in eos_ids if eos is not None],
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        chat_templates=_templates(metadata),
        special_tokens=_special_tokens(metadata, tokens),
    )


def _byte_level(path: Path, vocabulary: dict[str, int], merges: list[str], pre: str) -> Backend:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"{path}: merge {merge!r} names a token that is not in the vocabulary")
        pairs.append((left, right))
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _PATTERNS:
        found = _PATTERNS[pre]
        patterns = (found,) if isinstance(found, str) else found
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join((*_GPT2, *_SINGLE_DIGITS, *_PATTERNS))
        raise UnsupportedModelError(
            f"{path}: GGUF pre-tokenizer {pre!r} is not supported; supported are {known}."
            " Set tokenizer to the original model's tokenizer.json"
        )
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(path: Path, vocabulary: dict[str, int], metadata: Mapping[str, Any]) -> Backend:
    """SentencePiece's BPE: the neighbours that form the best-scored token merge first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores must hold one number per token")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token_id], -len(left), -len(right), left, right))
    # Ties as transformers' converter breaks them, so that ids agree with converted tokenizers.
    merges.sort(key=lambda merge: merge[:3])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=next((token for token, token_id in vocabulary.items() if token_id == unknown), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend


def _strings(path: Path, metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{path} has no tokenizer.ggml.{name}; the file holds no usable vocabulary")
    return value


def _checked_id(path: Path, token_id: int | None, tokens: list[str]) -> int | None:
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{path}: special token id {token_id} is outside the vocabulary of {len(tokens)}")
    return token_id


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {
        str(name): metadata[f"tokenizer.chat_template.{name}"]
        for name in metadata.get("tokenizer.chat_templates", [])
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return templates


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            found[name] = tokens[token_id]
    return found
