"""`bench compare_modes`: continuous batching against static batches, on the same requests and programs.

Two engines, alike but for `batching`, run a workload in turns in one process; with too little memory for two, each run
builds its own. All requests are there at the start. The ratio is the median over pairs of runs. Beside it stands the
ratio that decode steps alone allow, from the outputs' lengths: a static batch lasts as long as its longest output, a
slot under continuous batching takes the next request at once.
"""

from __future__ import annotations

import gc
import heapq
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl.flags import FlagValues

from jaxserve import LLM, SamplingParams
from jaxserve.bench.load.client import Item
from jaxserve.bench.load.requests import read_items
from jaxserve.bench.offline import figures
from jaxserve.bench.report import Column, report
from jaxserve.engine.stats import EngineStats
from jaxserve.runtime.memory_plan import available_bytes

MODES = ("continuous", "static")
SLOTS, DTYPE, RUNS = 8, "bfloat16", 5
"""Where the flags do not say."""
PAGE_SIZE, TOKEN_BUDGET = 16, 512

COLUMNS = (
    Column("batching", "batching"),
    Column("output_tokens_per_s", "output tokens/s", ".1f"),
    Column("iterations", "iterations", ".0f"),
    Column("decode_steps", "decode steps", "d"),
    Column("slot_utilisation", "slot utilisation", ".1%"),
    Column("wall_s", "s", ".1f"),
    Column("ratio_to_static", "ratio to static", ".2f"),
    Column("step_ratio_to_static", "by decode steps", ".2f"),
)


def run(flags: FlagValues) -> None:
    """Runs both modes in turns and reports.

    Raises:
      ValueError: a flag or the workload breaks a rule.
    """
    slots, dtype = _one(flags, "slots", SLOTS), _one(flags, "dtypes", DTYPE)
    num_runs = flags.runs if flags["runs"].present else RUNS
    if flags.workload is None or flags.workload == "w3":
        raise ValueError("compare_modes needs a workload: w1, w2 or a file")
    name, items = read_items(flags.workload, flags.seed)
    outputs = [item.max_tokens for item in items]
    steps = {"continuous": continuous_steps(outputs, slots), "static": static_steps(outputs, slots)}
    engines = _Engines(flags.model, dtype, slots, max(len(item.prompt) + item.max_tokens for item in items))
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    texts: dict[str, list[list[int]]] = {}
    for _ in range(num_runs):
        for mode in MODES:
            found, texts[mode] = _one_run(engines.of(mode), items, slots)
            runs[mode].append(found)
    pairs = list(zip(runs["continuous"], runs["static"], strict=True))
    ratios = [ours["output_tokens_per_s"] / static["output_tokens_per_s"] for ours, static in pairs]
    ratio, step_ratio = statistics.median(ratios), steps["static"] / steps["continuous"]
    results = [
        {
            "batching": mode,
            **{key: statistics.median(each[key] for each in of_mode) for key in of_mode[0]},
            "decode_steps": steps[mode],
            "ratio_to_static": ratio if mode == "continuous" else 1.0,
            "step_ratio_to_static": step_ratio if mode == "continuous" else 1.0,
            "runs": of_mode,
        }
        for mode, of_mode in runs.items()
    ]
    settings = {"model": flags.model, "workload": name, "dtype": dtype, "slots": slots, "runs": num_runs}
    more = {
        "ratio_continuous_over_static": ratio,
        "ratios": ratios,
        "ratio_least": min(ratios),
        "ratio_largest": max(ratios),
        "ratio_decode_steps_allow": step_ratio,
        "equal_outputs_share": statistics.fmean(a == b for a, b in zip(*texts.values(), strict=True)),
        "engines_at_once": engines.both,
    }
    settings |= {"requests": len(items), "output_tokens": sum(outputs)}
    report("compare_modes", settings, results, COLUMNS, flags.output, more=more)
    print(f"ratio_continuous_over_static: {ratio:.2f} ({min(ratios):.2f}..{max(ratios):.2f} over {len(ratios)} pairs)")


def static_steps(outputs: Sequence[int], slots: int) -> int:
    """Decode steps of static batches: the longest output of each, batches in order of arrival."""
    return sum(max(outputs[first : first + slots]) for first in range(0, len(outputs), slots))


def continuous_steps(outputs: Sequence[int], slots: int) -> int:
    """Decode steps when the slot that is free first takes the next request."""
    busy_until = [0] * slots
    for length in outputs:
        heapq.heapreplace(busy_until, busy_until[0] + length)
    return max(busy_until)


class _Engines:
    """An engine per mode; both kept where memory lets.

    Attributes:
      both: whether they are.
    """

    def __init__(self, model: str, dtype: str, slots: int, max_model_len: int) -> None:
        self._settings: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "max_num_seqs": slots,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max(TOKEN_BUDGET, slots),
            "page_size": PAGE_SIZE,
            "enable_prefix_caching": False,  # every run computes the same prompts
            "skip_tokenizer_init": True,
        }
        self._kept = {"continuous": self._make("continuous")}
        plan = self._kept["continuous"].engine.runner.memory_plan
        needed = plan.weights_bytes + plan.workspace_bytes + plan.state_bytes + plan.kv_bytes
        self.both = needed < 0.8 * _free_bytes()
        if self.both:
            self._kept["static"] = self._make("static")

    def of(self, mode: str) -> LLM:
        """The engine of a mode; when only one fits it may have to be made first."""
        if mode not in self._kept:
            self._kept.clear()
            gc.collect()  # an engine is part of reference cycles, and its arrays with it
            self._kept[mode] = self._make(mode)
        return self._kept[mode]

    def _make(self, mode: str) -> LLM:
        llm = LLM(**self._settings, batching=mode)
        llm.generate([[0]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        return llm


def _one_run(llm: LLM, items: Sequence[Item], slots: int) -> tuple[dict[str, float], list[list[int]]]:
    params = [SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    stats = llm.engine.stats = EngineStats()
    began = time.perf_counter()
    outputs = llm.generate([list(item.prompt) for item in items], params, use_tqdm=False)
    wall_s = time.perf_counter() - began
    return figures(stats, wall_s, slots), [list(output.outputs[0].token_ids) for output in outputs]


def _free_bytes() -> int:
    """Of the device, or of the host on CPU."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else available_bytes(device)


def _one(flags: FlagValues, name: str, default: Any) -> Any:
    """The flag's one value.

    Raises:
      ValueError: it has several.
    """
    if not flags[name].present:
        return default
    values = flags[name].value
    if len(values) != 1:
        raise ValueError(f"{name} is {','.join(map(str, values))}; compare_modes takes one")
    return values[0]
