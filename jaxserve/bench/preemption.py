"""`bench preemption`: what the modes of preemption cost when KV pages are scarce, beside ample pages.

All engines get the same requests, in turns: one run each, then the next of each.
"""

from __future__ import annotations

import statistics
from typing import Any

from absl.flags import FlagValues

from jaxserve import LLM
from jaxserve.bench.offline import make_llm, make_requests, one_run
from jaxserve.bench.report import Column, report
from jaxserve.config.policy_config import PREEMPTIONS

AMPLE = "ample pages"
MODES = tuple(mode for mode in PREEMPTIONS if mode != "pause")

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("preemption", "preemption"),
    Column("output_tokens_per_s", "output tokens/s", ".1f"),
    Column("ratio", "of ample pages", ".1%"),
    Column("preemptions", "preemptions", ".0f"),
    Column("recomputed_tokens", "recomputed tokens", ".0f"),
    Column("swapped_mib", "swapped MiB", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count, each several times, and reports medians.

    Raises:
      ValueError: so few pages that a request does not fit.
    """
    results = [result for dtype in flags.dtypes for slots in flags.slots for result in measure(flags, dtype, slots)]
    names = ("model", "prompt_tokens", "output_tokens", "requests_per_slot", "runs", "page_share")
    report("preemption", {name: flags[name].value for name in names}, results, COLUMNS, flags.output)


def measure(flags: FlagValues, dtype: str, slots: int) -> list[dict[str, Any]]:
    """A result per mode, medians over the runs; the first is the one with ample pages."""
    llms = {AMPLE: make_llm(flags, dtype, slots)}
    config = llms[AMPLE].engine.runner.scheduler_config
    pages_per_seq = config.pages_needed(flags.prompt_tokens + flags.output_tokens)
    num_pages = int(slots * pages_per_seq * flags.page_share) + 1
    if num_pages <= pages_per_seq:
        raise ValueError(
            f"page_share is {flags.page_share:g}: {num_pages - 1} pages for {slots} slots; a request needs"
            f" {pages_per_seq}, so it must be at least {pages_per_seq / (slots * pages_per_seq):.2g}"
        )
    for mode in MODES:
        scarce: dict[str, Any] = {"num_pages": num_pages, "reservation": "optimistic", "preemption": mode}
        llms[mode] = make_llm(flags, dtype, slots, **scarce)
    prompts, params = make_requests(flags, slots, llms[AMPLE].engine.limits.vocab_size)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    for _ in range(flags.runs):
        for name, llm in llms.items():
            before = _costs(llm)
            figures = one_run(llm, prompts, params, slots)
            costs = {key: value - before[key] for key, value in _costs(llm).items()}
            runs[name].append({"output_tokens_per_s": figures["output_tokens_per_s"], **costs})
    results = []
    for name, of_mode in runs.items():
        medians = {key: statistics.median(run[key] for run in of_mode) for key in of_mode[0]}
        ratios = [
            run["output_tokens_per_s"] / ample["output_tokens_per_s"]
            for run, ample in zip(of_mode, runs[AMPLE], strict=True)
        ]
        results.append(
            {"dtype": dtype, "slots": slots, "preemption": name, **medians, "ratio": statistics.median(ratios)}
        )
    return results


def _costs(llm: LLM) -> dict[str, float]:
    """Since the engine's start."""
    counters = llm.engine.scheduler.counters
    return {
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "swapped_mib": counters.swapped_pages * llm.engine.runner.page_bytes / 2**20,
    }
