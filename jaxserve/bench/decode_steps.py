"""`bench decode_steps`: what several decode steps in one dispatch save.

Engines, alike but for `max_decode_steps`, run the same requests in turns in one process, so that a change in the
machine's speed meets all of them. A ratio is the median over the turns, of an engine to the first. No request waits, or
there would be single steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from absl.flags import FlagValues

from jaxserve import LLM, SamplingParams
from jaxserve.bench.offline import figures, make_llm, make_requests
from jaxserve.bench.report import Column, report
from jaxserve.engine.stats import EngineStats

VALUES, REQUESTS_PER_SLOT = (1, 8), 1
"""Where the flags do not say."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("max_decode_steps", "max steps", "d"),
    Column("steps_per_iteration", "steps/dispatch", ".2f"),
    Column("output_tokens_per_s", "output tokens/s", ".1f"),
    Column("ratio_tokens_per_s", "ratio", ".2f"),
    Column("host_us_per_token", "host us/token", ".1f"),
    Column("ratio_host", "ratio", ".2f"),
    Column("hidden_share", "hidden", ".0%"),
    Column("equal_outputs_share", "equal outputs", ".1%"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count and reports."""
    values = tuple(flags.max_decode_steps or VALUES)
    results = [each for dtype in flags.dtypes for slots in flags.slots for each in measure(flags, dtype, slots, values)]
    settings = {name: flags[name].value for name in ("model", "prompt_tokens", "output_tokens", "runs", "overlap")}
    report("decode_steps", settings | {"max_decode_steps": values}, results, COLUMNS, flags.output)


def measure(flags: FlagValues, dtype: str, slots: int, values: tuple[int, ...]) -> list[dict[str, Any]]:
    """A result per value, of `flags.runs` turns."""
    engines = [make_llm(flags, dtype, slots, max_decode_steps=value) for value in values]
    per_slot = flags.requests_per_slot if flags["requests_per_slot"].present else REQUESTS_PER_SLOT
    prompts, params = make_requests(flags, slots, engines[0].engine.limits.vocab_size, per_slot)
    for llm in engines:
        _one_run(llm, prompts, params, slots)  # so that each has measured its steps
    turns = [[_one_run(llm, prompts, params, slots) for llm in engines] for _ in range(flags.runs)]
    results = []
    for index, value in enumerate(values):
        runs = [turn[index][0] for turn in turns]
        firsts = [turn[0][0] for turn in turns]
        ratios = {
            name: [run[key] / first[key] for run, first in zip(runs, firsts, strict=True)]
            for name, key in (("tokens_per_s", "output_tokens_per_s"), ("host", "host_us_per_token"))
        }
        results.append(
            {
                "dtype": dtype,
                "slots": slots,
                "max_decode_steps": value,
                **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
                **{f"ratio_{name}": statistics.median(found) for name, found in ratios.items()},
                **{f"ratios_{name}": found for name, found in ratios.items()},
                "equal_outputs_share": statistics.fmean(
                    a == b for turn in turns for a, b in zip(turn[index][1], turn[0][1], strict=True)
                ),
            }
        )
    return results


def _one_run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], slots: int
) -> tuple[dict[str, float], list[list[int]]]:
    stats = llm.engine.stats = EngineStats()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - began
    return figures(stats, wall_s, slots), [list(output.outputs[0].token_ids) for output in outputs]
