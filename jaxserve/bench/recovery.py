"""`bench recovery`: how long clients wait when a step fails.

All slots decode; then the dispatch of a step raises. The time is from there to the next token: of the first request
that has one, and of all of them. Pages are found in the prefix cache again, or every request is computed anew, because
there is no cache or because the pool was lost and made anew. `failure-free step` is the median time of a step without
failures, to compare with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from absl import logging
from absl.flags import FlagValues

from jaxserve import LLM
from jaxserve.bench.offline import make_llm, make_requests
from jaxserve.bench.report import Column, MeasurementError, report
from jaxserve.core import Submission
from jaxserve.faults import InjectedFault

CASES = {
    "prefix cache": ({"enable_prefix_caching": True}, False),
    "no cache": ({}, False),
    "pool lost": ({}, True),
}
"""Settings of the engine, and whether its pool is lost with the step."""
STEPS_BEFORE = 12
"""Decode steps that each slot has had when one fails."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("case", "case"),
    Column("step_ms", "failure-free step ms", ".1f"),
    Column("recover_ms", "ready again ms", ".1f"),
    Column("first_token_ms", "first token ms", ".1f"),
    Column("all_tokens_ms", "all tokens ms", ".1f"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count and reports medians over the runs."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)  # the failures are meant
    try:
        results = [each for dtype in flags.dtypes for slots in flags.slots for each in measure(flags, dtype, slots)]
    finally:
        logging.set_verbosity(level)
    names = ("model", "prompt_tokens", "output_tokens", "runs")
    report("recovery", {name: flags[name].value for name in names}, results, COLUMNS, flags.output)


def measure(flags: FlagValues, dtype: str, slots: int) -> list[dict[str, Any]]:
    """A result per case.

    Raises:
      ValueError: outputs are so short that requests end before a step fails, or soon after.
    """
    if flags.output_tokens < 4 * STEPS_BEFORE:
        raise ValueError(f"output_tokens is {flags.output_tokens}; it must be at least {4 * STEPS_BEFORE}")
    results = []
    for name, (settings, is_lost) in CASES.items():
        llm = make_llm(flags, dtype, slots, **settings)
        runs = [_one_failure(flags, llm, slots, is_lost=is_lost) for _ in range(flags.runs)]
        medians = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        results.append({"dtype": dtype, "slots": slots, "case": name, **medians})
    return results


def _one_failure(flags: FlagValues, llm: LLM, slots: int, *, is_lost: bool) -> dict[str, float]:
    engine, runner = llm.engine, llm.engine.runner
    if engine.config.enable_prefix_caching:
        engine.reset_prefix_cache()
    counts: dict[str, int] = {}
    arrived: dict[str, float] = {}  # instant of each request's last token

    def take(name: str, count: int) -> None:
        counts[name] = counts.get(name, 0) + count
        arrived[name] = time.perf_counter()

    prompts, params = make_requests(flags, slots, engine.limits.vocab_size, 1)
    for index, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
        for request in engine.make_requests(Submission(prompt, settings, f"r{index}"), time.monotonic()):
            engine.add(request, 0, lambda delta, name=request.request_id: take(name, len(delta.token_ids)))  # type: ignore[misc]
    laps = list(_laps(lambda: len(counts) < slots or min(counts.values()) < STEPS_BEFORE, engine.step))
    original, failed_at = runner.dispatch, 0.0

    def fail(prepared: Any) -> Any:
        nonlocal failed_at
        runner.dispatch = original  # type: ignore[method-assign]
        failed_at = time.perf_counter()
        if is_lost:
            for array in (runner._pool.pages, *runner._state):
                array.delete()
        raise InjectedFault("bench")

    runner.dispatch = fail  # type: ignore[method-assign]
    while not failed_at:
        engine.step()
    ready_at = time.perf_counter()
    before = dict(counts)
    first_at = 0.0
    while any(counts[name] == before[name] for name in before):
        if not engine.step():
            raise MeasurementError("a request ended when its step failed")
        if not first_at and counts != before:
            first_at = time.perf_counter()
    all_at = time.perf_counter()
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return {
        "step_ms": 1e3 * statistics.median(laps[-STEPS_BEFORE // 2 :]),
        "recover_ms": 1e3 * (ready_at - failed_at),
        "first_token_ms": 1e3 * (first_at - failed_at),
        "all_tokens_ms": 1e3 * (all_at - failed_at),
    }


def _laps(wanted: Any, step: Any) -> Iterator[float]:
    """Durations of steps, as long as one is wanted."""
    while wanted():
        began = time.perf_counter()
        step()
        yield time.perf_counter() - began
