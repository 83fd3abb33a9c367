"""A tokenizer as the files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.text.tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    templates: Any = tokenizer.chat_templates
    if set(templates) <= {"default"}:
        templates = templates.get("default")
    else:
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    settings: dict[str, Any] = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
    }
    if templates:
        settings["chat_template"] = templates
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
