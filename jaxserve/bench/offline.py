"""`bench offline`: how fast the offline engine is at several dtypes and slot counts."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from absl.flags import FlagValues

from jaxserve import LLM, SamplingParams
from jaxserve.bench.report import Column, report
from jaxserve.bench.server_settings import read_server_settings
from jaxserve.config import EngineConfig
from jaxserve.engine.stats import EngineStats

PREFILL_TOKENS = 128
"""Prompt tokens of an iteration: one compiled prefill shape, so that a measurement starts soon."""

PAGE_SIZE = 16

NOBODY_COMES_S = 3600.0
"""What an arrival may lose to decode steps: all requests of a run are there when it begins."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("quantization", "weights"),
    Column("slots", "slots", "d"),
    Column("output_tokens_per_s", "output tokens/s", ".1f"),
    Column("slot_utilisation", "slot utilisation", ".1%"),
    Column("padding_ratio", "padding", ".1%"),
    Column("wasted_rows", "wasted", ".0f"),
    Column("steps_per_iteration", "steps/dispatch", ".2f"),
    Column("host_ms_per_iteration", "host ms/step", ".2f"),
    Column("host_us_per_token", "host us/token", ".1f"),
    Column("hidden_share", "hidden", ".0%"),
    Column("device_ms_per_iteration", "device ms/step", ".1f"),
)


SETTINGS_COLUMNS = (Column("settings", "settings"), *COLUMNS[2:])
"""Of `--settings`."""


def run(flags: FlagValues) -> None:
    """Measures every dtype, or all of `--settings`, at every slot count, each several times, and reports medians."""
    if flags.settings:
        both = [name for name in ("dtypes", "quantizations", "max_decode_steps") if flags[name].present]
        if both:
            raise ValueError(f"--{both[0]} says nothing beside --settings; give it there")
        results = [each for slots in flags.slots for each in measure_settings(flags, slots)]
    else:
        results = [each for dtype in flags.dtypes for slots in flags.slots for each in measure(flags, dtype, slots)]
    settings = {name: flags[name].value for name in ("model", "prompt_tokens", "output_tokens", "runs", "overlap")}
    if not flags.settings:
        settings["max_decode_steps"] = _max_decode_steps(flags)
    columns = SETTINGS_COLUMNS if flags.settings else COLUMNS
    report("offline", settings | {"requests_per_slot": flags.requests_per_slot}, results, columns, flags.output)


def measure(flags: FlagValues, dtype: str, slots: int) -> list[dict[str, Any]]:
    """Medians over the runs of one setting, for each form of the weights; their runs take turns.

    Raises:
      ValueError: `max_decode_steps` has several values.
    """
    steps = _max_decode_steps(flags)
    llms = {
        name: make_llm(flags, dtype, slots, max_decode_steps=steps, quantization=None if name == "none" else name)
        for name in flags.quantizations
    }
    measured = _in_turns(flags, llms, slots)
    return [{"dtype": dtype, "quantization": name} | figures_of for name, figures_of in measured.items()]


def measure_settings(flags: FlagValues, slots: int) -> list[dict[str, Any]]:
    """As `measure`, for each of `--settings`.

    Raises:
      ValueError: a setting cannot be, or is one that the measurement makes itself.
    """
    if len(set(flags.settings)) < len(flags.settings):
        raise ValueError("--settings has the same twice")
    llms = {}
    for each in flags.settings:
        chosen = read_server_settings(each, taken=_own_settings(flags, slots))
        llms[each] = make_llm(flags, chosen.pop("dtype", EngineConfig(model="").dtype), slots, **chosen)
    dtypes = {name: llm.engine.config.dtype for name, llm in llms.items()}
    measured = _in_turns(flags, llms, slots)
    return [{"settings": name, "dtype": dtypes[name]} | figures_of for name, figures_of in measured.items()]


def _in_turns(flags: FlagValues, llms: dict[str, LLM], slots: int) -> dict[str, dict[str, Any]]:
    """Medians over the runs of each engine; their runs take turns."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    for _ in range(flags.runs):
        for name, llm in llms.items():
            prompts, params = make_requests(flags, slots, llm.engine.limits.vocab_size)
            runs[name].append(one_run(llm, prompts, params, slots))
    about = {"slots": slots, "requests": len(prompts), "output_tokens": sum(each.max_tokens or 0 for each in params)}
    return {
        name: about | {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in runs.items()
    }


def make_llm(flags: FlagValues, dtype: str, slots: int, **settings: Any) -> LLM:
    """An engine for the requests of `make_requests`, with one compiled shape of each kind; it has run once."""
    own = _own_settings(flags, slots)
    llm = LLM(dtype=dtype, **own | {"skip_tokenizer_init": True, "max_arrival_delay_s": NOBODY_COMES_S} | settings)
    llm.generate([[0]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    return llm


def _own_settings(flags: FlagValues, slots: int) -> dict[str, Any]:
    """What the requests of `make_requests` ask of every engine: one compiled shape of each kind."""
    budget = max(PREFILL_TOKENS, slots)
    max_model_len = flags.prompt_tokens + flags.output_tokens
    return {
        "model": flags.model,
        "max_model_len": max_model_len,
        "max_num_seqs": slots,
        "max_num_batched_tokens": budget,
        "decode_buckets": (slots,),
        "prefill_buckets": (budget,),
        "table_width_buckets": (-(-max_model_len // PAGE_SIZE),),
        "page_size": PAGE_SIZE,
        "overlap": flags.overlap,
        "enable_prefix_caching": False,  # every run computes the same prompts
    }


def make_requests(
    flags: FlagValues, slots: int, vocab_size: int, requests_per_slot: int | None = None
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, and outputs from half of `output_tokens` up to it.

    So slots are freed at different times, and utilisation says how well they are filled again.
    """
    rng = np.random.default_rng(0)
    count = slots * (requests_per_slot or flags.requests_per_slot)
    prompts = [rng.integers(0, vocab_size, flags.prompt_tokens).tolist() for _ in range(count)]
    lengths = rng.integers(flags.output_tokens // 2, flags.output_tokens + 1, count).tolist()
    return prompts, [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


def one_run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], slots: int) -> dict[str, float]:
    """Generates all; its `figures`."""
    llm.engine.stats = EngineStats()
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return figures(llm.engine.stats, time.perf_counter() - began, slots)


def figures(stats: EngineStats, wall_s: float, slots: int) -> dict[str, float]:
    """One run's figures.

    Args:
      stats: of the run alone.
      wall_s: its duration.
      slots: of the engine.

    Returns:
      Shares in [0, 1]: `slot_utilisation`, slots with work for live requests over all slots, mean over steps;
      `padding_ratio`, rows of the compiled shapes that held no token; `hidden_share`, of the host's work, done while
      the device was busy. `steps_per_iteration`: 1 but for iterations of several decode steps.
    """
    iterations = max(stats.iterations, 1)
    return {
        "wall_s": wall_s,
        "iterations": stats.iterations,
        "output_tokens_per_s": stats.output_tokens / wall_s,
        "slot_utilisation": stats.slot_utilisation(slots),
        "padding_ratio": 1 - stats.tokens / max(stats.padded_tokens, 1),
        "wasted_rows": stats.wasted_rows,
        "steps_per_iteration": stats.steps_per_iteration,
        "host_ms_per_iteration": 1e3 * stats.host_s / iterations,
        "host_us_per_token": 1e6 * stats.host_s / max(stats.output_tokens, 1),
        "hidden_share": stats.hidden_share,
        "device_ms_per_iteration": 1e3 * stats.device_s / iterations,
    }


def _max_decode_steps(flags: FlagValues) -> int:
    """The flag's one value, 1 unless given.

    Raises:
      ValueError: it has several.
    """
    values = flags.max_decode_steps or [1]
    if len(values) != 1:
        raise ValueError(f"max_decode_steps is {','.join(map(str, values))}; offline takes one, decode_steps several")
    return int(values[0])
