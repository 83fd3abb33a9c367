"""Finding a model's tokenizer: tokenizer.json beside the weights, or rebuilt from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.json_file import read_json_object
from jaxserve.text.chat_template import named_templates
from jaxserve.text.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ModelFiles(Protocol):
    """The part of a `ResolvedModel` that is looked at."""

    @property
    def kind(self) -> str: ...

    @property
    def path(self) -> Path: ...


def load_tokenizer(
    resolved: ModelFiles,
    override: str | None = None,
    chat_template: str | None = None,
    special_tokens_in_chat: bool = False,
) -> Tokenizer:
    """The tokenizer of a resolved model.

    Args:
      resolved: `kind` "gguf" reads the file's metadata; others the files beside the weights.
      override: a directory, tokenizer.json or .gguf file to use instead.
      special_tokens_in_chat: see `Tokenizer`.
      chat_template: a file with a Jinja template to use instead of all that the tokenizer has.

    Raises:
      CheckpointError: a tokenizer file is missing or damaged, or the template's file is.
      UnsupportedModelError: a kind of tokenizer that is not known.
    """
    tokenizer = _find(resolved, override)
    if special_tokens_in_chat:
        tokenizer = tokenizer.with_special_tokens_in_chat()
    if chat_template is None:
        return tokenizer
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise CheckpointError(f"chat_template {chat_template!r} does not exist; give a file with a Jinja template")
    try:
        return tokenizer.with_chat_template(file.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"chat_template {chat_template!r} is not UTF-8: {error}") from error


def _find(resolved: ModelFiles, override: str | None) -> Tokenizer:
    path = Path(override).expanduser() if override else resolved.path
    if override and not path.exists():
        raise CheckpointError(f"tokenizer {override!r} does not exist; give a directory, tokenizer.json or .gguf file")
    if path.suffix == ".gguf" or (not override and resolved.kind == "gguf"):
        from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(path)
    if path.is_file():
        return _from_directory(path.parent, path)
    return _from_directory(path, path / "tokenizer.json")


def _from_directory(directory: Path, file: Path) -> Tokenizer:
    if not file.is_file():
        remedy = "convert it with transformers' AutoTokenizer(...).save_pretrained, or set tokenizer"
        other = "tokenizer.model" if (directory / "tokenizer.model").is_file() else None
        if other is not None:
            raise UnsupportedModelError(f"{directory / other} is a SentencePiece file without tokenizer.json; {remedy}")
        raise CheckpointError(f"{file} is missing; a model directory needs its tokenizer.json (or set tokenizer)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file} is not a readable tokenizer: {error}") from error
    # Padding and truncation set for training would change prompts.
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(directory / "tokenizer_config.json")
    special = _special_tokens(directory, config)
    bos_id = _id_of(backend, special.get("bos_token"))
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=_eos_ids(directory, backend, special),
        adds_bos=config.get("add_bos_token"),
        chat_templates=_templates(directory, config),
        special_tokens=special,
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    known = {**_read_json(directory / "special_tokens_map.json"), **config}
    found = {}
    for name in _SPECIAL_NAMES:
        value = known.get(name)
        if isinstance(value, Mapping):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over the config's entry, as in transformers."""
    templates = named_templates(config.get("chat_template"))
    legacy = _read_json(directory / "chat_template.json")
    templates.update(named_templates(legacy.get("chat_template")))
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text("utf-8")
    return templates


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> list[int]:
    """The generation config's end ids (else the model config's), then the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    own = _id_of(backend, special.get("eos_token"))
    return [*ids, own] if own is not None else ids


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    found: int | None = None if token is None else backend.token_to_id(token)
    return found
