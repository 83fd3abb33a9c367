"""Writes a model's tokenizer as a Hugging Face folder, for clients that count tokens themselves.

Usage: python tools/clients/write_tokenizer.py MODEL FOLDER    with the project's Python
MODEL is what the server's --model takes; needed where that is no such folder already, as the demo model's GGUF file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxserve.loading import resolve_model
from jaxserve.text import load_tokenizer


def main(model: str, folder: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = load_tokenizer(resolve_model(model))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    special = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    settings = {name: tokenizer.token_text(token_id) for name, token_id in special.items() if token_id is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
