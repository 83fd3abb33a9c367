"""Writes a tiny random model and what transformers makes of it, as `tests/models/tiny_models.py` reads them.

Usage: python tests/golden/write_tiny_model.py NAME    in an environment with torch and transformers, from PyPI
NAME is a key of `CONFIGS`. To add a family, add its config here: few layers, a small vocabulary, no two sizes equal,
every feature that differs from layer to layer at least twice.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

_SHAPE = {
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "starcoder2_layernorm": ("Starcoder2", {**_SHAPE, "sliding_window": 8}),
    "glm4_interleaved": ("Glm4", {**_SHAPE, "head_dim": 16, "rms_norm_eps": 1e-5}),
    "smollm3_nope": (
        "SmolLM3",
        {**_SHAPE, "num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16},
    ),
}
_PROMPT, _GREEDY, _POSITION = 41, 24, 20
_DIFFERENT = 8
"""Ids that a greedy continuation must have at least: one that repeats itself would hide errors of position."""


def main(name: str) -> None:
    """Writes config.json, model.safetensors and golden.json."""
    family, fields = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        for tensor_name, tensor in model.named_parameters():
            tensor.data = _random(tensor_name, tensor.shape, generator, is_tied=model.config.tie_word_embeddings)
        golden = _golden(model, generator)
        if len(set(golden["greedy_ids"])) >= _DIFFERENT:
            break
    folder = Path(__file__).parent / "tiny_models" / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def _random(name: str, shape: torch.Size, generator: torch.Generator, *, is_tied: bool) -> torch.Tensor:
    """Large enough that every part shows in the logits, norms and biases too.

    Args:
      is_tied: the embedding is the output layer too: a large one would make every token ask for itself.
    """
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    return values * (
        (0.06 if is_tied else 0.35) if "embed_tokens" in name or "lm_head" in name else 0.95 * shape[-1] ** -0.5
    )


@torch.no_grad()
def _golden(model: transformers.PreTrainedModel, generator: torch.Generator) -> dict[str, Any]:
    prompt = torch.randint(3, model.config.vocab_size, (_PROMPT,), generator=generator).tolist()
    logits = model(torch.tensor([prompt])).logits[0]
    logprobs = logits.log_softmax(-1)
    of_prompt = [round(float(logprobs[i, token]), 5) for i, token in enumerate(prompt[1:])]
    ids, gaps = list(prompt), []
    while len(ids) < _PROMPT + _GREEDY:  # without a cache, so that it is the model alone
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
    return {
        "source": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
        "prompt_ids": prompt,
        "greedy_ids": ids[_PROMPT:],
        "greedy_top2_gaps": gaps,
        "logits_last": _rounded(logits[-1]),
        "logits_position_20": _rounded(logits[_POSITION]),
        "logprobs_of_prompt": [None, *of_prompt],
    }


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


if __name__ == "__main__":
    main(*sys.argv[1:])
