"""`bench quality`: what smaller numbers cost: perplexity on a text, and the distance from a reference's distributions.

Every setting reads the same text in windows, chunk by chunk through its KV pages as a prefill does, and the
distribution of each next token in a window's second half is scored:

    perplexity = exp(mean of -ln p(next token))
    KL         = mean over positions of sum over the vocabulary of p_reference * ln(p_reference / p)

The reference is the first setting; its distributions wait on disk. The first half of a window is context only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl.flags import FlagValues

import jaxserve
from jaxserve import LLM
from jaxserve.bench.report import Column, report
from jaxserve.bench.server_settings import read_server_settings
from pallas_kernels.matmul import num_bytes

TEXT = Path(jaxserve.__file__).resolve().parents[1] / "configs" / "texts" / "alice.txt"
SETTINGS = (
    "--dtype=float32",
    "--dtype=bfloat16",
    "--dtype=bfloat16 --quantization=int8",
    "--dtype=bfloat16 --quantization=int4",
    "--dtype=bfloat16 --quantization=int8_channel",
    "--dtype=bfloat16 --quantization=fp8",
    "--dtype=bfloat16 --kv_cache_dtype=int8",
)
"""Where no `--settings` are given."""
CHUNK = 128
"""Tokens computed at once: their logits are in memory together."""

COLUMNS = (
    Column("settings", "settings"),
    Column("weights_mib", "weights MiB", ".1f"),
    Column("kv_bytes_per_token", "K/V bytes/token", ".0f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("kl_mean", "KL mean", ".5f"),
    Column("kl_p99", "KL p99", ".4f"),
    Column("same_best", "same best token", ".1%"),
)


def run(flags: FlagValues) -> None:
    """Scores every setting and reports.

    Raises:
      ValueError: the text cannot be read or is too short, or a setting cannot be.
    """
    settings = flags.settings or list(SETTINGS)
    try:
        text = Path(flags.text or TEXT).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: {flags.text or TEXT} cannot be read: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        results = measure(flags.model, settings, text, flags.window, Path(folder))
    about = {"model": flags.model, "text": str(flags.text or TEXT.name), "window": flags.window}
    report("quality", about | {"positions": results[0]["positions"]}, results, COLUMNS, flags.output)


def measure(model: str, settings: Sequence[str], text: str, window: int, folder: Path) -> list[dict[str, Any]]:
    """A row per setting, compared with the first.

    Args:
      settings: command lines of `jaxserve.server`.
      folder: where the reference's distributions are kept meanwhile.

    Raises:
      ValueError: see `windows_of`; or a setting cannot be.
    """
    results = []
    for each in settings:
        llm = make_llm(model, each, window)
        windows = windows_of(llm.engine.tokenizer.encode(text, add_special_tokens=False), window)
        results.append({"settings": each} | sizes(llm) | score(llm, windows, folder, is_reference=not results))
        del llm
    return results


def make_llm(model: str, settings: str, window: int) -> LLM:
    """An engine with settings of a command line, for prompts of `window` tokens."""
    own = {
        "model": model,
        "max_num_seqs": 1,
        "max_model_len": window + 1,
        "max_num_batched_tokens": CHUNK,
        "prefill_chunk": CHUNK,
        "decode_buckets": (1,),
        "prefill_buckets": (CHUNK,),
    }
    return LLM(**own, **read_server_settings(settings, taken=own))


def windows_of(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Pieces of `window` tokens that overlap by half, so that every token after the first half is scored once.

    Raises:
      ValueError: there is not one whole piece.
    """
    starts = range(0, len(token_ids) - window + 1, window - window // 2)
    if not starts:
        raise ValueError(f"the text has {len(token_ids)} tokens; window is {window}")
    return [list(token_ids[start : start + window]) for start in starts]


def sizes(llm: LLM) -> dict[str, float]:
    """Bytes of weights and of a token's K and V."""
    runner = llm.engine.runner
    weights = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(runner.params))
    config = runner.scheduler_config
    token_bytes = runner.page_bytes * len(config.windows) / config.page_size
    return {"weights_mib": weights / 2**20, "kv_bytes_per_token": token_bytes}


def score(llm: LLM, windows: list[list[int]], folder: Path, *, is_reference: bool) -> dict[str, Any]:
    """Figures over the scored positions of all windows; a reference writes its distributions, others read them."""
    losses: list[np.ndarray] = []
    divergences: list[np.ndarray] = []
    same: list[np.ndarray] = []
    for number, window in enumerate(windows):
        for part, (targets, log_p) in enumerate(_scored(llm, window)):
            path = folder / f"{number}-{part}.npy"
            if is_reference:
                np.save(path, log_p)
            reference = log_p if is_reference else np.load(path)
            losses.append(-log_p[np.arange(len(targets)), targets])
            divergences.append((np.exp(reference) * (reference - log_p)).sum(axis=1, dtype=np.float64))
            same.append(reference.argmax(axis=1) == log_p.argmax(axis=1))
    divergence = np.concatenate(divergences)
    return {
        "positions": len(divergence),
        "perplexity": float(np.exp(np.concatenate(losses).mean(dtype=np.float64))),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "same_best": float(np.concatenate(same).mean()),
    }


def _scored(llm: LLM, window: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(next tokens int[n], log-probabilities float32[n, V]) of the positions that count, chunk by chunk."""
    first, start = len(window) // 2, 0
    for logits in llm.engine.runner.prompt_logits(window):
        targets = np.asarray(window[start + 1 : start + len(logits) + 1])
        skipped = max(first - 1 - start, 0)
        start += len(logits)
        kept, targets = logits[skipped : len(targets)], targets[skipped:]
        if len(targets):
            shifted = kept - kept.max(axis=1, keepdims=True)
            yield targets, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
