"""`bench structured`: what grammars cost, every row under one against none, on one engine in turns."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from absl.flags import FlagValues

from jaxserve import LLM, SamplingParams, StructuredOutputs
from jaxserve.bench.offline import make_llm, make_requests
from jaxserve.bench.report import Column, report
from jaxserve.engine.stats import EngineStats

GRAMMAR = """
start: line+
line: %json {
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 24},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
    "address": {
      "type": "object",
      "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
      "required": ["street", "zip"],
      "additionalProperties": false
    }
  },
  "required": ["name", "age", "tags", "address"],
  "additionalProperties": false
} "\\n"
"""
"""JSON documents, a line each and without end, so that outputs are as long as those without a grammar."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("free_tokens_per_s", "tokens/s", ".1f"),
    Column("bound_tokens_per_s", "with grammar", ".1f"),
    Column("ratio", "ratio", ".1%"),
    Column("step_ms", "step ms", ".2f"),
    Column("mask_us_per_token", "mask us/token", ".1f"),
    Column("accept_us_per_token", "accept us/token", ".1f"),
    Column("share_of_step", "of the step", ".2%"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count, each several times, and reports medians."""
    results = [measure(flags, dtype, slots) for dtype in flags.dtypes for slots in flags.slots]
    names = ("model", "prompt_tokens", "output_tokens", "requests_per_slot", "runs")
    report("structured", {name: flags[name].value for name in names}, results, COLUMNS, flags.output)


def measure(flags: FlagValues, dtype: str, slots: int) -> dict[str, Any]:
    """Medians over the pairs of one setting."""
    llm = make_llm(flags, dtype, slots, skip_tokenizer_init=False)
    prompts, free = make_requests(flags, slots, llm.engine.limits.vocab_size)
    bound = [replace(params, structured_outputs=StructuredOutputs(grammar=GRAMMAR)) for params in free]
    _one_run(llm, prompts[:slots], bound[:slots])
    pairs = [(_one_run(llm, prompts, free), _one_run(llm, prompts, bound)) for _ in range(flags.runs)]
    medians = {key: statistics.median(pair[1][key] for pair in pairs) for key in pairs[0][1]}
    return {
        "dtype": dtype,
        "slots": slots,
        "free_tokens_per_s": statistics.median(pair[0]["tokens_per_s"] for pair in pairs),
        "bound_tokens_per_s": medians.pop("tokens_per_s"),
        "ratio": statistics.median(pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"] for pair in pairs),
        **medians,
    }


def _one_run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, float]:
    """Figures of a run; `share_of_step`: time on masks and tokens over that of an iteration, in [0, 1]."""
    engine = llm.engine
    stats = engine.stats = EngineStats()
    times = engine.grammar_times
    before = (times.mask_s, times.accept_s, times.masked_tokens)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - began
    mask_s, accept_s = times.mask_s - before[0], times.accept_s - before[1]
    tokens = max(times.masked_tokens - before[2], 1)
    steps_s = stats.host_s + stats.device_s
    return {
        "tokens_per_s": stats.output_tokens / wall_s,
        "step_ms": 1e3 * steps_s / max(stats.iterations, 1),
        "mask_us_per_token": 1e6 * mask_s / tokens,
        "accept_us_per_token": 1e6 * accept_s / tokens,
        "share_of_step": (mask_s + accept_s) / steps_s,
    }
