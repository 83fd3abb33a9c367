"""The tokenizer's files beside weights."""

from __future__ import annotations

import shutil
from pathlib import Path

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies those of a model directory that are there into another."""
    for name in _FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, target / name)
