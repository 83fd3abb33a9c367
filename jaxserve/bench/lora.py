"""`bench lora`: what LoRA adapters cost.

Three engines run the same requests in turns in one process: without LoRA in its default form, without LoRA with layers
one by one, which is the form that LoRA has, and with LoRA. The last runs once per number of adapters in a batch, its
requests naming them in turn. Ratios are medians over the turns, of the time to that of the second engine.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl.flags import FlagValues
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.bench.offline import make_llm, make_requests
from jaxserve.bench.report import Column, report
from jaxserve.models import ModelConfig, lora_weights

REQUESTS_PER_SLOT = 1

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("engine", "engine"),
    Column("output_tokens_per_s", "output tokens/s", ".1f"),
    Column("ratio_decode", "time to one by one", ".2f"),
    Column("prompt_tokens_per_s", "prompt tokens/s", ".0f"),
    Column("ratio_prefill", "time to one by one", ".2f"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count and reports."""
    with tempfile.TemporaryDirectory() as folder:
        results = [
            each for dtype in flags.dtypes for slots in flags.slots for each in _measure(flags, dtype, slots, folder)
        ]
    names = ("model", "prompt_tokens", "output_tokens", "runs", "adapters", "lora_rank")
    report("lora", {name: flags[name].value for name in names}, results, COLUMNS, flags.output)


def _measure(flags: FlagValues, dtype: str, slots: int, folder: str) -> list[dict[str, Any]]:
    """A result per engine and number of adapters."""
    most = max(*flags.adapters, 1)
    lora = make_llm(flags, dtype, slots, enable_lora=True, max_loras=most, max_lora_rank=flags.lora_rank)
    for index in range(most):
        path = _write(Path(folder) / f"{index}", lora.engine.model_config, flags.lora_rank, index)
        lora.load_lora_adapter(f"{index}", str(path))
    cases: dict[str, tuple[LLM, list[str]]] = {
        "without, one by one": (make_llm(flags, dtype, slots, decoder_implementation="xla"), [""]),
        "without": (make_llm(flags, dtype, slots), [""]),
    }
    for count in flags.adapters:
        cases[f"{count} adapters"] = (lora, [f"{index}" for index in range(count)] or [""])
    prompts, params = make_requests(flags, slots, lora.engine.limits.vocab_size, REQUESTS_PER_SLOT)
    turns = [
        {name: _one_run(llm, prompts, params, names) for name, (llm, names) in cases.items()}
        for _ in range(flags.runs + 1)
    ][1:]
    results = []
    for name in cases:
        decode, prefill = zip(*(turn[name] for turn in turns), strict=True)
        first_decode, first_prefill = zip(*(turn["without, one by one"] for turn in turns), strict=True)
        results.append(
            {
                "dtype": dtype,
                "slots": slots,
                "engine": name,
                "output_tokens_per_s": statistics.median(decode),
                "ratio_decode": _ratio(first_decode, decode),
                "prompt_tokens_per_s": statistics.median(prefill),
                "ratio_prefill": _ratio(first_prefill, prefill),
            }
        )
    return results


def _ratio(rates: tuple[float, ...], others: tuple[float, ...]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def _one_run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], names: list[str]) -> tuple[float, float]:
    """Output tokens per second, without the time of the prompts; prompt tokens per second."""
    lora = [names[index % len(names)] for index in range(len(prompts))]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), lora=lora, use_tqdm=False)
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate(prompts, params, lora=lora, use_tqdm=False)
    decode_s = time.perf_counter() - began - prefill_s
    num_output = sum(each.max_tokens or 0 for each in params) - len(prompts)
    return num_output / decode_s, sum(map(len, prompts)) / prefill_s


def _write(path: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """A random adapter of all matrices, as PEFT stores it."""
    path.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for weight in lora_weights(config):
        prefix, (rows, out) = f"base_model.model.{weight.hf_name.removesuffix('.weight')}", weight.shape
        tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, rows**-0.5, (rank, rows)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.01, (out, rank)).astype(np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return path
