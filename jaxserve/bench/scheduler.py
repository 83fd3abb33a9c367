"""`bench scheduler`: what the host does per iteration, without a device.

An iteration costs the host `schedule`, the tables and `update`. A device step takes milliseconds, and
overlapped with it all three are free while they take less; beyond that they set the pace. So they are timed
in the state that matters, slots full and decoding: outputs are of different lengths, a few requests end in
each iteration, and the queue refills their slots.

Times are of the processor, not of the clock on the wall: other work on the machine is not counted, though it
slows the caches. Nothing here loads jax. Tokens are made up: the scheduler looks at them only to find stop ids.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.report import Column, report
from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import GROWING_RESERVATIONS, RESERVATIONS
from jaxserve.core import Request, SamplingParams
from jaxserve.scheduler import Scheduler, StepPlan, StepResult
from jaxserve.tables import BucketTable, TableBuilder

PROMPT_TOKENS, OUTPUT_TOKENS, PAGE_SIZE = 256, 256, 16
TENANTS = 16
SCARCE = 0.85
"""Pages, as a share of the maxima of all slots, for reservations that need not set the maxima aside."""
STOP_ID = 2
STEP_S = 0.02
"""Pretended duration of a step: the scheduler is told the time, it never looks."""

COLUMNS = (
    Column("setting", "setting"),
    Column("running", "running", "d"),
    Column("waiting", "waiting", "d"),
    Column("schedule_us", "schedule us", ".0f"),
    Column("tables_us", "tables us", ".0f"),
    Column("update_us", "update us", ".0f"),
    Column("total_us", "total us", ".0f"),
    Column("total_p99_us", "p99 us", ".0f"),
    Column("operations", "calls, loops", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Measures policies at every number of running and waiting requests, then the other choices at one.

    Those are each reservation and the prefix cache, at 256 running and 1000 waiting, or the nearest asked for.
    """
    results = []
    for policy, running, waiting in itertools.product(flags.policies, flags.running, flags.waiting):
        results.append(measure(flags.iterations, running, waiting, policy=policy))
    running = min(flags.running, key=lambda count: abs(count - 256))
    waiting = min(flags.waiting, key=lambda count: abs(count - 1000))
    for reservation in RESERVATIONS[1:]:
        results.append(measure(flags.iterations, running, waiting, reservation=reservation))
    results.append(measure(flags.iterations, running, waiting, prefix_cache=True))
    settings = {
        "iterations": flags.iterations,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "page_size": PAGE_SIZE,
    }
    report("scheduler", settings, results, COLUMNS, flags.output)


def measure(
    iterations: int,
    running: int,
    waiting: int,
    *,
    policy: str = "fcfs",
    reservation: str = "guaranteed",
    prefix_cache: bool = False,
) -> dict[str, Any]:
    """Times iterations of one setting.

    Returns:
      Medians over iterations; `total_p99_us` is their 99th percentile. `operations` are counted, see
      `counted_operations`, mean of some. `mean_running` tells whether the slots were full. `setting` names what is
      not the default.
    """
    state = SteadyState(running, waiting, policy=policy, reservation=reservation, prefix_cache=prefix_cache)
    gc.collect()  # of the setting before
    state.warm_up()
    laps = [state.step() for _ in range(iterations)]
    with counted_operations() as clock:
        operations = [sum(state.step(clock)) for _ in range(min(iterations, 50))]
    parts = dict(zip(("schedule_us", "tables_us", "update_us"), zip(*laps, strict=True), strict=True))
    totals = [sum(lap) for lap in laps]
    return {
        "setting": "prefix cache" if prefix_cache else reservation if reservation != RESERVATIONS[0] else policy,
        "policy": policy,
        "reservation": reservation,
        "prefix_cache": prefix_cache,
        "running": running,
        "waiting": waiting,
        **{name: 1e6 * statistics.median(times) for name, times in parts.items()},
        "total_us": 1e6 * statistics.median(totals),
        "total_p99_us": 1e6 * sorted(totals)[int(0.99 * (len(totals) - 1))],
        "operations": statistics.mean(operations),
        "mean_running": state.mean_running,
    }


class SteadyState:
    """A scheduler and a table builder whose slots stay full: for each request that ends another arrives.

    Args:
      running: slots, all of them in use.
      waiting: requests in the queue.
      policy, reservation, prefix_cache: of the scheduler.
    """

    def __init__(
        self,
        running: int,
        waiting: int,
        *,
        policy: str = "fcfs",
        reservation: str = "guaranteed",
        prefix_cache: bool = False,
    ) -> None:
        max_model_len = PROMPT_TOKENS + OUTPUT_TOKENS
        share = 1.0 if reservation == "guaranteed" else SCARCE
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=running + 8 * PROMPT_TOKENS,
            prefill_chunk=PROMPT_TOKENS,
            page_size=PAGE_SIZE,
            num_pages=int(share * running * max_model_len / PAGE_SIZE) + 1,
            max_model_len=max_model_len,
            max_queue_requests=running + waiting,
            max_queue_tokens=(running + waiting) * max_model_len,
            policy=policy,
            reservation=reservation,
            preemption="recompute" if reservation in GROWING_RESERVATIONS else "pause",
            enable_prefix_caching=prefix_cache,
        )
        self.scheduler = Scheduler(config)
        self._builder = TableBuilder(config, BucketTable(config))
        self._requests: dict[str, Request] = {}
        self._rng = random.Random(0)
        self._num_arrivals = 0
        self._num_live = running + waiting
        self._now = 0.0
        self._running: list[int] = []

    @property
    def mean_running(self) -> float:
        """Requests that were running, mean over the iterations since the warm-up."""
        return statistics.mean(self._running)

    def warm_up(self) -> None:
        """Runs until the slots are full and their requests are at every stage of their outputs."""
        # First outputs of any length, or all would end together.
        for _ in range(self.scheduler.config.max_num_seqs):
            self._arrive(self._rng.randint(2, OUTPUT_TOKENS))
        while len(self._requests) < self._num_live:
            self._arrive(self._draw_output())
        for _ in range(self.scheduler.config.max_num_seqs // 8 + OUTPUT_TOKENS // 2):
            self.step()
        self._running = []

    def step(self, clock: Callable[[], float] = time.thread_time) -> tuple[float, float, float]:
        """One iteration; as many requests arrive as ended in it.

        Args:
          clock: what is measured, by its readings.

        Returns:
          How far the clock went on in `schedule`, the tables and `update`; not in arrivals.
        """
        began = clock()
        plan = self.scheduler.schedule(self._now)
        scheduled = clock()
        self._builder.build(plan, self._requests.__getitem__)
        built = clock()
        result = self._tokens(plan)
        answered = clock()
        events = self.scheduler.update(plan, result, self._now + STEP_S)
        updated = clock()
        self._now += STEP_S
        self._running.append(len(plan.decode) + len(plan.prefill))
        for event in events.ended:
            del self._requests[event.request_id]
            self._arrive(self._draw_output())
        return scheduled - began, built - scheduled, updated - answered

    def _draw_output(self) -> int:
        return self._rng.randint(OUTPUT_TOKENS // 2, OUTPUT_TOKENS)

    def _arrive(self, output: int) -> None:
        number, rng = self._num_arrivals, self._rng
        self._num_arrivals += 1
        # Half of each prompt is one of a few beginnings, for the prefix cache to find.
        prompt = (rng.randrange(8),) * (PROMPT_TOKENS // 2) + (number,) * (PROMPT_TOKENS // 2)
        request = Request(
            f"request-{number}",
            prompt,
            SamplingParams(temperature=1.0, max_tokens=output),
            eos_token_ids=(STOP_ID,),
            max_tokens=output,
            priority=rng.randint(-1, 1),
            deadline_at=self._now + 1e6 + rng.random(),
            tenant=f"tenant-{rng.randrange(TENANTS)}",
        )
        self._requests[request.request_id] = request
        rejection = self.scheduler.add(request, self._now)
        assert rejection is None, f"{request.request_id} was refused: {rejection}"

    @staticmethod
    def _tokens(plan: StepPlan) -> StepResult:
        """What a device would answer: tokens that stop nobody."""
        return StepResult((1000,) * len(plan.decode), (1000,) * len(plan.prefill))


@contextmanager
def counted_operations() -> Iterator[Callable[[], int]]:
    """Counts what Python executes: calls, of its functions and of C's, and rounds of loops.

    Counts repeat from run to run and from machine to machine, as times do not. What a C function does inside is
    one call, so a `sorted` of everything is not seen.

    Yields:
      A clock that counts.
    """
    events = sys.monitoring.events
    tool, count = sys.monitoring.PROFILER_ID, 0

    def one_more(*_: Any) -> None:
        nonlocal count
        count += 1

    sys.monitoring.use_tool_id(tool, "jaxserve.bench")
    try:
        for event in (events.CALL, events.JUMP):
            sys.monitoring.register_callback(tool, event, one_more)
        sys.monitoring.set_events(tool, events.CALL | events.JUMP)
        yield lambda: count
    finally:
        sys.monitoring.set_events(tool, 0)
        for event in (events.CALL, events.JUMP):
            sys.monitoring.register_callback(tool, event, None)
        sys.monitoring.free_tool_id(tool)
