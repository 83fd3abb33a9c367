"""Small tokenizers for tests: byte-level with hand-made bytes, a trained BPE, and a SentencePiece one."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.testing.tiny import write_tiny_tokenizer
from jaxserve.text import Tokenizer

CORPUS = [
    "Café — 123 😊, the river runs from the hills to the sea; 2024 was 42 times 48.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\n",
    "The quick brown fox doesn't jump over the lazy dogs' kennels. I'LL pay  12345 dollars!\r\n",
    "世界 こんにちは 你好。世界 Привет мир — naïve façade",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(directory: Path) -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 up are special."""
    write_tiny_tokenizer(directory)
    return Tokenizer(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")), bos_id=256, eos_ids=[257])


def trained_bpe(pre_tokenizer=None) -> tokenizers.Tokenizer:
    """A byte-level BPE with merges, cut as SmolLM2's unless told otherwise."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


SENTENCEPIECE_BYTE_BASE = 3  # id of <0x00>
SENTENCEPIECE_PIECES = {
    # piece: score. Higher merges first; "▁the" forms before "he" can take its letters.
    "▁": -100.0,
    "t": -101.0,
    "h": -102.0,
    "e": -103.0,
    "r": -104.0,
    "th": -3.0,
    "he": -4.0,
    "the": -2.0,
    "▁the": -1.0,
    "re": -5.0,
    "▁t": -6.0,
}


def sentencepiece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a Llama-2-like vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_PIECES]
    scores = [0.0] * (3 + 256) + list(SENTENCEPIECE_PIECES.values())
    types = [2, 3, 3] + [6] * 256 + [1] * len(SENTENCEPIECE_PIECES)
    return tokens, scores, types


def sentencepiece() -> tokenizers.Tokenizer:
    """The same vocabulary as a Hugging Face tokenizer without merges: pieces of one character, else bytes."""
    tokens, _, _ = sentencepiece_tokens()
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend
