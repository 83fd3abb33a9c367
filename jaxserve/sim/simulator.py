"""Simulator: the serving scheduler under a simulated clock.

The object that plans is `jaxserve.scheduler.Scheduler` itself, called in the engine's order; only the device
and the clock are replaced. A cost model says how long each plan takes, a source says when requests come.

    schedule(now) ─▶ plan ─▶ runs on the device, from when it is free, for cost_model.step_s
    arrivals while it runs are added at their own instants
    update(plan) at its end; then arrivals of that very instant; then the next plan

With `max_steps_ahead` of the scheduler's settings above 0 the host plans ahead of the device by so many
iterations, as an overlapped engine does. When nobody is live the clock jumps to the next arrival, and where a
batch is held back until it is full or `batch_timeout_s` have passed, to the first of these. Nothing here is
random or reads a clock: the same arguments give the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason
from jaxserve.scheduler import Scheduler, StepPlan, StepResult, TokenEvent, TokenEvents
from jaxserve.sim.cost_model import CostModel, plan_s
from jaxserve.sim.request_log import COMPLETED, LiveRequest, RequestLog
from jaxserve.sim.source import OTHER_ID, STOP_ID, Source
from jaxserve.sim.timeline import Span, Timeline

if TYPE_CHECKING:
    from jaxserve.sim.split import SplitTotals

ALL_TERMINAL, ITERATION_LIMIT = "all_terminal", "iteration_limit"
MAX_ITERATIONS = 100_000_000

_OUTCOMES = {
    FinishReason.STOP: COMPLETED,
    FinishReason.LENGTH: COMPLETED,
    FinishReason.ABORT: "aborted",
    FinishReason.EXPIRED: "expired",
    FinishReason.ERROR: "failed",
    FinishReason.UNFOLLOWABLE: "failed",
}


@dataclass(slots=True)
class Totals:
    """Sums over the iterations.

    Attributes:
      steps: that ran in the iterations: one in each, or several decode steps.
      slot_steps: slots with work, summed over steps; wasted_rows: of these, of requests that had ended when the
        iteration was over.
      tokens: computed, prefill and decode.
      recomputed_tokens: whose K/V a preemption dropped; swapped_pages: copied to the host or back; both by
        service class.
      cached_tokens: found in the prefix cache.
      busy_s: the device was busy.
      ended_at: instant at which the simulation ended.
    """

    iterations: int = 0
    steps: int = 0
    slot_steps: int = 0
    wasted_rows: int = 0
    tokens: int = 0
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    swapped_pages: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    busy_s: float = 0.0
    ended_at: float = 0.0


@dataclass(slots=True)
class SimulationResult:
    """What a run left.

    Attributes:
      termination: "all_terminal", or "iteration_limit" when requests were still live or to come.
      split: of a run of several engines, whose sums the others are.
    """

    config: SchedulerConfig
    termination: str = ALL_TERMINAL
    log: RequestLog = field(default_factory=RequestLog)
    timeline: Timeline = field(default_factory=Timeline)
    totals: Totals = field(default_factory=Totals)
    split: SplitTotals | None = None


class Simulator:
    """Runs a workload to its end, once.

    Args:
      config: of the scheduler.
      cost_model: seconds of an iteration.
      source: arrivals.
      trace: gets the scheduler's records, see `jaxserve.scheduler.trace`.
      max_iterations: after which it stops, whoever is live.
      keep_ids: keep the requests' ids in the log.
      on_plan: called with every plan that runs.
      on_end: called with the id of every request that ends or is refused.
      log: shared with other simulators; None: its own.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost_model: CostModel,
        source: Source,
        *,
        trace: Callable[[dict[str, Any]], None] | None = None,
        max_iterations: int = MAX_ITERATIONS,
        keep_ids: bool = False,
        on_plan: Callable[[StepPlan], None] | None = None,
        on_end: Callable[[str], None] | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, trace=trace)
        self._on_plan = on_plan
        self._on_end = on_end
        self._cost_model = cost_model
        self._source = source
        self._max_iterations = max_iterations
        self._live: dict[str, LiveRequest] = {}
        self._just_ended: dict[str, LiveRequest] = {}  # since the last plan, which may name them as preempted
        # With the tokens that its decode rows bring, where there are several steps, and the instant of its end.
        self._flights: deque[tuple[StepPlan, tuple[int, ...], float]] = deque()
        self._device_free_at = 0.0
        self._now = 0.0
        self._result = SimulationResult(config, log=RequestLog(keep_ids=keep_ids) if log is None else log)

    def run(self) -> SimulationResult:
        """Simulates until no request is live or to come, or until the limit."""
        for instant in self.turns():
            if instant is None:
                break
        return self.result()

    def turns(self) -> Iterator[float | None]:
        """The same in pieces, for who has several on one clock.

        Yields:
          The instant of what happens next, before it does: the source may still bring arrivals up to then. None:
          nothing is left to do; what the source brings by the next turn is taken up.
        """
        totals = self._result.totals
        self._add_arrivals(self._now)
        while True:
            plan = self.scheduler.schedule(self._now)
            self._end(self.scheduler.take_events())
            if not plan.empty:
                self._dispatch(plan)
            elif not self._flights:
                yield self._next_instant()
                if (at := self._next_instant()) is not None:
                    self._now = max(self._now, at)
                    self._add_arrivals(self._now)
                continue
            keep = self._result.config.max_steps_ahead if not plan.empty else len(self._flights) - 1
            while len(self._flights) > keep:
                yield self._flights[0][2]
                self._land(*self._flights.popleft())
            self._add_arrivals(self._now)
            if totals.iterations >= self._max_iterations and (self._live or self._source.peek() is not None):
                self._result.termination = ITERATION_LIMIT
                return

    @property
    def working(self) -> bool:
        """Whether a plan is on the device."""
        return bool(self._flights)

    def result(self) -> SimulationResult:
        """What the run left, once it is over."""
        self.scheduler.flush_trace()
        totals, counters = self._result.totals, self.scheduler.counters
        totals.ended_at = self._now
        totals.recomputed_tokens = dict(counters.recomputed_tokens_of)
        totals.swapped_pages = dict(counters.swapped_pages_of)
        totals.cached_tokens = counters.cached_tokens
        totals.wasted_rows = counters.wasted_rows
        for live in self._live.values():
            self._result.log.close(live)
        return self._result

    def _next_instant(self) -> float | None:
        """When there may be something to plan again; None while nothing is known of."""
        return min((at for at in (self._source.peek(), self._batch_ready_at()) if at is not None), default=None)

    def _batch_ready_at(self) -> float | None:
        """When a batch that is held back goes without being full; None when nobody waits."""
        if self.scheduler.idle:
            return None
        config = self._result.config
        held_back = config.batching == "request_dynamic" and not self.scheduler.num_running
        assert held_back, f"nothing is planned, yet live: {self.scheduler.live_ids}"
        arrived_at = self.scheduler.sequence(self.scheduler.waiting_ids[0]).arrived_at
        ready_at = arrived_at + config.batch_timeout_s
        # Rounding may leave the sum short of the timeout.
        while ready_at - arrived_at < config.batch_timeout_s:
            ready_at = nextafter(ready_at, inf)
        assert ready_at > self._now, f"nothing is planned at {self._now}, when a batch has waited since {arrived_at}"
        return ready_at

    def _dispatch(self, plan: StepPlan) -> None:
        if self._on_plan:
            self._on_plan(plan)
        decode_tokens = self._num_to_come(plan) if plan.num_steps > 1 else ()
        windows = self._result.config.windows
        duration_s, num_steps = plan_s(self._cost_model, plan, decode_tokens, windows)
        assert duration_s > 0.0, f"the cost model gives plan {plan.iteration} {duration_s} s"
        began_at = max(self._now, self._device_free_at)
        self._device_free_at = began_at + duration_s
        self._flights.append((plan, decode_tokens, self._device_free_at))
        log = self._result.log
        for request_id in plan.preempted:
            log.preempted(self._live.get(request_id) or self._just_ended[request_id])
        self._just_ended = {}
        for chunk in plan.prefill:
            log.started(self._live[chunk.request_id], began_at)
        num_decode = sum(decode_tokens) if plan.num_steps > 1 else len(plan.decode)
        self._result.totals.steps += num_steps
        self._count(plan, num_decode, began_at, duration_s)

    def _num_to_come(self, plan: StepPlan) -> tuple[int, ...]:
        """Tokens that each row of several steps brings: its steps, or what is left until its stop id."""
        counts = []
        for row in plan.decode:
            num_before = row.position + 1 - self.scheduler.sequence(row.request_id).num_prompt_tokens
            left = self._live[row.request_id].num_before_last + 1 - num_before
            counts.append(max(min(row.num_steps, left), 0))
        return tuple(counts)

    def _count(self, plan: StepPlan, num_decode: int, began_at: float, duration_s: float) -> None:
        totals, scheduler = self._result.totals, self.scheduler
        num_prefill = plan.num_tokens - len(plan.decode)
        totals.iterations += 1
        totals.slot_steps += num_decode + len(plan.prefill)
        totals.tokens += num_decode + num_prefill
        totals.busy_s += duration_s
        self._result.timeline.add(
            Span(
                began_at=began_at,
                ended_at=began_at + duration_s,
                busy_s=duration_s,
                iterations=1,
                decode_tokens=num_decode,
                prefill_tokens=num_prefill,
                pages_owned=scheduler.pages_owned,
                queue=scheduler.num_waiting,
                active=len(plan.decode) + len(plan.prefill),
            )
        )

    def _land(self, plan: StepPlan, decode_tokens: tuple[int, ...], ends_at: float) -> None:
        """The device has finished a plan; what arrived meanwhile was there before."""
        self._add_arrivals(ends_at, inclusive=False)
        self._now = max(self._now, ends_at)
        if plan.num_steps > 1:
            result = StepResult((), (), tuple(map(self._run, plan.decode.request_ids, decode_tokens)))
        else:
            result = StepResult(
                self._sample(plan.decode.request_ids), self._sample([chunk.request_id for chunk in plan.prefill])
            )
        self._take_step(self.scheduler.update(plan, result, self._now))

    def _sample(self, request_ids: Iterable[str]) -> tuple[int, ...]:
        """The next token of each: the stop id where the output ends with it."""
        # Runs once per row and iteration, and so is written in one.
        live_of = self._live.get
        return tuple(
            [
                OTHER_ID if (live := live_of(each)) is None or live.num_tokens < live.num_before_last else STOP_ID
                for each in request_ids
            ]
        )

    def _run(self, request_id: str, count: int) -> tuple[int, ...]:
        """The next `count` tokens of one; the last is the stop id where the output ends with it."""
        if not count:
            return ()
        live = self._live.get(request_id)
        is_last = live is not None and live.num_tokens + count > live.num_before_last
        return (OTHER_ID,) * (count - 1) + (STOP_ID if is_last else OTHER_ID,)

    def _add_arrivals(self, until: float, *, inclusive: bool = True) -> None:
        while (at := self._source.peek()) is not None and (at < until or (inclusive and at <= until)):
            arrival = self._source.take()
            self._now = max(self._now, at)
            live = self._result.log.arrived(arrival)
            rejection = self.scheduler.add(arrival.request, self._now)
            self._end(self.scheduler.take_events())  # it may have displaced another
            if rejection is None:
                self._live[arrival.request.request_id] = live
            else:
                self._result.log.refused(live, rejection.reason, self._now)
                self._source.ended(self._now, rejection.retry_after_s)
                self._tell_end(arrival.request.request_id)

    def _take_step(self, events: TokenEvents) -> None:
        """Tokens by column, then the ends."""
        log, now, live_of = self._result.log, self._now, self._live
        for request_id in events.request_ids:
            log.token(live_of[request_id], now)
        for request_id, later in zip(events.request_ids, events.later, strict=False):
            for _ in later:
                log.token(live_of[request_id], now)
        for event in events.prefill:
            if event.token_id is not None:
                log.token(live_of[event.request_id], now)
        self._end(events.ended)

    def _end(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.finish_reason is not None, f"{event.request_id} has not ended"
            live = self._just_ended[event.request_id] = self._live.pop(event.request_id)
            self._log_end(live, FinishReason(event.finish_reason))
            self._tell_end(event.request_id)

    def _tell_end(self, request_id: str) -> None:
        if self._on_end:
            self._on_end(request_id)

    def _log_end(self, live: LiveRequest, reason: FinishReason) -> None:
        if reason is FinishReason.DISPLACED:
            self._result.log.refused(live, str(reason), self._now)
        else:
            self._result.log.ended(live, _OUTCOMES[reason], self._now)
        self._source.ended(self._now)
