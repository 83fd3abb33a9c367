"""`bench host_work`: the engine thread's own work in an iteration, by part.

Requests are W1's (or `--workload`'s), repeated `--requests_per_slot` times the slots. All are there at the start, so
that slots are filled again as they are freed, and a run ends when the last one has a slot. A run without timers gives
the whole: wall time is the engine's laps (`EngineStats.host_s`), CPU time what the thread used over all calls of
`Engine.step`. A second run gives the parts: the engine's calls are wrapped from outside. Waiting for tokens is in
neither, and both runs must compile nothing.

Beside other work, XLA's own threads among it, the thread is put off its core: wall time holds that, CPU time does not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from typing import Any

import jax
from absl.flags import FlagValues

from jaxserve.bench.load.client import Item
from jaxserve.bench.load.requests import read_items
from jaxserve.bench.report import Column, MeasurementError, report
from jaxserve.config import EngineConfig
from jaxserve.core import SamplingParams, Submission
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import EngineStats
from jaxserve.runtime import COMPILES, StepHandle, StepOutput
from jaxserve.testing.tiny import write_tiny_model

TINY = "tiny"
"""The `--model` that is the tests' tiny model, written anew."""
TINY_CONTEXT = 512
SLOTS, DTYPE, WORKLOAD = (8, 32), "bfloat16", "w1"
"""Where the flags do not say."""
PAGE_SIZE, TOKEN_BUDGET = 16, 512

PARTS = ("schedule", "prepare", "dispatch", "sample", "collect", "update", "deliver", "other")
"""Planning; tables; starting the step and its sampler; reading tokens that are there; the scheduler's and the requests'
share of them; the loop itself, metrics and monitor."""

COLUMNS = (
    Column("slots", "slots", "d"),
    Column("iterations", "iterations", ".0f"),
    Column("rows", "rows", ".1f"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("cpu_ms", "CPU ms", ".3f"),
    Column("hidden_share", "hidden", ".0%"),
    Column("wait_ms", "wait ms", ".2f"),
    *(Column(f"cpu_ms_of.{part}", part, ".3f") for part in PARTS),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype at every slot count; the parts shown are CPU ms."""
    dtypes = flags.dtypes if flags["dtypes"].present else (DTYPE,)
    slots = flags.slots if flags["slots"].present else SLOTS
    name, items = read_items(flags.workload or WORKLOAD, flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = flags.model
        if model == TINY:
            model = str(write_tiny_model(folder, max_position=TINY_CONTEXT))
        results = [measure(flags, model, dtype, count, items) for dtype in dtypes for count in slots]
    settings = {key: flags[key].value for key in ("model", "requests_per_slot", "runs", "overlap")}
    report("host_work", settings | {"workload": name}, results, COLUMNS, flags.output)


def measure(flags: FlagValues, model: str, dtype: str, slots: int, items: tuple[Item, ...]) -> dict[str, Any]:
    """Medians of one setting, in ms per iteration.

    Raises:
      MeasurementError: something compiled while requests ran.
    """
    max_model_len = max(len(item.prompt) + item.max_tokens for item in items)
    engine = _make_engine(flags, model, dtype, slots, max_model_len)
    requests = list(islice(cycle(items), slots * flags.requests_per_slot))
    _one_run(engine, requests[: 2 * slots])
    compiled = COMPILES.count
    whole = [_one_run(engine, requests) for _ in range(flags.runs)]
    with _timed_parts(engine) as clock:
        split = [_one_split(engine, requests, clock) for _ in range(flags.runs)]
    if COMPILES.count != compiled:
        raise MeasurementError(f"{COMPILES.count - compiled} programs compiled after warm-up; none may")
    result: dict[str, Any] = {"dtype": dtype, "slots": slots, "requests": len(requests)}
    result |= {key: statistics.median(each[key] for each in whole) for key in whole[0]}
    for index, clock in enumerate(("wall", "cpu")):
        result[f"{clock}_ms_of"] = {part: statistics.median(each[part][index] for each in split) for part in PARTS}
    return result | {"compiles": COMPILES.count - compiled}


def _make_engine(flags: FlagValues, model: str, dtype: str, slots: int, max_model_len: int) -> Engine:
    engine = Engine(
        EngineConfig(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=slots,
            max_num_batched_tokens=max(TOKEN_BUDGET, 4 * slots),
            max_queue_requests=1 << 30,
            max_queue_tokens=1 << 60,
            page_size=PAGE_SIZE,
            overlap=flags.overlap,
            enable_prefix_caching=False,  # every run computes the same prompts
            skip_tokenizer_init=True,
        )
    )
    engine.warm_up()
    return engine


def _one_run(engine: Engine, items: list[Item]) -> dict[str, float]:
    """Runs them until none waits any more, so that every slot is busy; figures of an iteration."""
    vocab = engine.limits.vocab_size
    for number, item in enumerate(items):
        params = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
        prompt = [token % vocab for token in item.prompt]
        (request,) = engine.make_requests(Submission(prompt, params, str(number)), now=time.monotonic())
        engine.add(request, 0, deque(maxlen=1).append)  # as a reader that keeps up
    stats = engine.stats = EngineStats()
    waited = _Wait()
    with _wrapped(engine.runner, "collect", waited.around):
        began = time.thread_time()
        while engine.scheduler.num_waiting:
            engine.step()
        cpu_s = time.thread_time() - began - waited.cpu_s
    figures = _figures(stats, waited, cpu_s)
    engine.abort_all()
    engine.land()
    return figures


def _figures(stats: EngineStats, waited: _Wait, cpu_s: float) -> dict[str, float]:
    iterations = stats.iterations
    return {
        "iterations": iterations,
        "rows": stats.slot_steps / iterations,
        "wall_ms": 1e3 * (stats.host_s + stats.device_s - waited.wall_s) / iterations,
        "cpu_ms": 1e3 * cpu_s / iterations,
        "hidden_share": stats.hidden_share,
        "wait_ms": 1e3 * waited.wall_s / iterations,
        "output_tokens": stats.output_tokens,
    }


def _one_split(engine: Engine, items: list[Item], clock: _Clock) -> dict[str, list[float]]:
    """Runs all; wall and CPU ms of an iteration, by part."""
    clock.clear()
    whole = _one_run(engine, items)
    parts = {part: [1e3 * each / whole["iterations"] for each in pair] for part, pair in clock.seconds.items()}
    totals = whole["wall_ms"], whole["cpu_ms"]
    parts["other"] = [total - sum(pair[index] for pair in parts.values()) for index, total in enumerate(totals)]
    return parts


class _Wait:
    """Waits for a step's tokens before they are collected, and keeps what the waiting took."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def around(self, collect: Callable[[StepHandle], StepOutput]) -> Callable[[StepHandle], StepOutput]:
        def wait_and_collect(handle: StepHandle) -> StepOutput:
            wall, cpu = time.perf_counter(), time.thread_time()
            assert handle.outputs is not None
            jax.block_until_ready(handle.outputs.tokens)
            self.cpu_s += time.thread_time() - cpu
            self.wall_s += time.perf_counter() - wall
            return collect(handle)

        return wait_and_collect


class _Clock:
    """Wall and CPU seconds of calls, by part; cleared between runs."""

    def __init__(self) -> None:
        self.seconds = {part: [0.0, 0.0] for part in PARTS}

    def clear(self) -> None:
        for pair in self.seconds.values():
            pair[:] = 0.0, 0.0

    def around(self, part: str) -> Callable[[Any], Any]:
        """What wraps a function so that its calls count."""
        pair = self.seconds[part]

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                wall, cpu = time.perf_counter(), time.thread_time()
                try:
                    return function(*arguments, **named)
                finally:
                    pair[1] += time.thread_time() - cpu
                    pair[0] += time.perf_counter() - wall

            return timed

        return wrap


@contextmanager
def _timed_parts(engine: Engine) -> Iterator[_Clock]:
    """The parts of the calls made meanwhile, but for "other"."""
    clock = _Clock()
    calls = (
        (engine.scheduler, "schedule", "schedule"),
        *((engine.runner, name, name) for name in ("prepare", "dispatch", "sample", "collect")),
        (engine.scheduler, "update", "update"),
        (engine._delivery, "take_step", "deliver"),
    )
    with ExitStack() as stack:
        for owner, name, part in calls:
            stack.enter_context(_wrapped(owner, name, clock.around(part)))
        yield clock


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `wrap(owner.name)` meanwhile."""
    before = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
