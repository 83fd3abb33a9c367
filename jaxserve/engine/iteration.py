"""Iterations: the engine's loop body, with as many steps in flight as the scheduler may plan ahead.

Without overlap (`max_steps_ahead` 0) one call of `step` is one iteration:

    plan n ─▶ tables ─▶ dispatch n ─▶ masks, sample n ─▶ collect n ─▶ update n ─▶ deliver n

With overlap (1) a call dispatches an iteration and takes in the one before it, so that the device has its next
step before the host has the last one's tokens:

    host     │ plan n+1, tables, dispatch n+1 │ collect n │ masks, sample n+1 │ update n, deliver n │ plan n+2 ...
    device   │ ... step n ───────────────────────────────▶│ logits n+1 ───▶ tokens n+1 ────────────▶│ ...

A row's input is the slot's last token, which is on the device; its position is known without it. Where no row of
n+1 is bound by a grammar or a word of several tokens, n+1 is sampled as soon as it is dispatched. Where one is, its
mask needs token n on the host: the logits of n+1 are computed meanwhile.

What the scheduler learns late, an end by a token or a stop string, costs a row: that of the ended request in the
plan in flight (`EngineStats.wasted_rows`). Its token is dropped at the update, by the sequence it was planned for,
whoever has its slot or its id by then.

A plan of several decode steps (`StepPlan.num_steps`) is one program that feeds tokens back itself; the host takes
them in together, as one step that brought several tokens a row. Its rows are bound by nothing the host makes.

A call of the runner that fails ends no request that can be computed again (`step_recovery`): what came back before it
is taken in, the rest is dropped.

When a plan is empty the oldest step in flight is taken in at once: no token waits for a next plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.core import Request, RequestFailedError
from jaxserve.engine.delivery import Delivery
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.engine.grammar_state import GrammarStates, Rows
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.monitor import EngineMonitor
from jaxserve.engine.output_processor import RequestState
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.step_recovery import StepFailedError, StepRecovery
from jaxserve.runtime import ModelRunner, StepHandle, StepOutput
from jaxserve.scheduler import Scheduler, StepPlan


@dataclass(slots=True, eq=False)
class _Flight:
    """A dispatched step.

    `bound` are its rows that sample under a mask, `scored` the requests of its chunks, where one wants its prompt
    scored. They may have ended, and their ids been taken by others, when it comes back.
    """

    plan: StepPlan
    planned_at: float
    handle: StepHandle
    bound: Rows
    scored: list[RequestState | None]
    has_failed: bool = False


class Iterations:
    """Plans, dispatches and takes in steps; called by the one thread that steps the engine.

    Args:
      scheduler, runner, grammars, delivery, metrics, monitor: of the engine.
      recovery: after steps that fail.
      cached: whether prompts are looked up in the prefix cache.
      lock: of the engine; held while host state changes, never while the device works.
      clock: the engine's.
      on_step: told, under the lock, that a step was taken in.

    Attributes:
      stats: sums over the steps taken in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        grammars: GrammarStates,
        delivery: Delivery,
        metrics: EngineMetrics,
        monitor: EngineMonitor,
        recovery: StepRecovery,
        *,
        cached: bool,
        lock: EngineLock,
        clock: Callable[[], float],
        on_step: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._delivery = delivery
        self._metrics = metrics
        self._monitor = monitor
        self._recovery = recovery
        self._cached = cached
        self._lock = lock
        self._clock = clock
        self._on_step = on_step
        self._max_ahead = scheduler.config.max_steps_ahead
        assert self._max_ahead <= 1, f"max_steps_ahead is {self._max_ahead}; the engine runs at most 1 step ahead"
        self._flights: deque[_Flight] = deque()
        self.stats = EngineStats()
        self._lap_began = 0.0
        self._busy_with = runner.newest

    @property
    def num_in_flight(self) -> int:
        """Steps dispatched and not yet taken in."""
        return len(self._flights)

    def step(self) -> bool:
        """Dispatches the next step, if there is one, and takes in the oldest that there is then one too many of.

        Returns:
          Whether a step was dispatched or taken in, or has failed.

        Raises:
          Exception: a step failed, and there is no going on.
        """
        try:
            return self._step()
        except StepFailedError as error:
            failure = error
        # Out of the handler: an error that is raised from here is not one that came while another was handled.
        self._recover(failure)
        return True

    def _step(self) -> bool:
        if self._scheduler.num_in_flight > len(self._flights) and self._recovery.alone:
            # An earlier plan was interrupted before it was dispatched.
            self._land()
            self._recovery.drop()
        if self._flights and self._flights[-1].handle.outputs is None:
            # An earlier step was interrupted. Sampled later than the next one, it would undo what that remembers.
            self._land()
        self._begin_lap()
        flight = self._dispatch()
        if flight is None:
            if not self._flights:
                return False
            self._end_lap()
        num_kept = len(self._flights) - 1 if flight is None else self._max_ahead
        while len(self._flights) > num_kept:
            self._take_in()
        return True

    def land(self) -> None:
        """Takes in every step in flight."""
        try:
            self._land()
            return
        except StepFailedError as error:
            failure = error
        self._recover(failure)

    def _recover(self, failure: StepFailedError) -> None:
        """Takes in what came back before the step that failed; that one, and those behind it, never were."""
        failed = next((at for at, flight in enumerate(self._flights) if flight.has_failed), len(self._flights))
        while len(self._flights) > failed:
            self._flights.pop()
        try:
            self._land()
        except StepFailedError as older:  # its error, which shows only now, is the cause of the later one's
            failure = older
        self._flights.clear()
        self._recovery.recover(failure)

    def _land(self) -> None:
        self._begin_lap()
        while self._flights:
            self._sample(self._flights[0])
            self._take_in()

    def _dispatch(self) -> _Flight | None:
        """Plans a step and starts it; None for an empty plan."""
        with self._lock:
            now = self._clock()
            self._recovery.before_plan(now)
            plan = self._scheduler.schedule(now)
            self._delivery.take_early_ends(now)
            if plan.empty:
                return None
            self._mark_scheduled(plan, now)
            if plan.preempted or plan.swaps:
                self._count_preemptions(plan)
            prepared = self._runner.prepare(plan, self._request_of, self._outputs_of)
            bound = self._grammars.rows(plan, prepared.tables.bucket)
            scored = self._scored(plan) if plan.prefill else []
        self._end_lap()
        try:
            handle = self._runner.dispatch(prepared)
        except Exception as error:
            raise StepFailedError("dispatch", error) from error
        flight = _Flight(plan, now, handle, bound, scored)
        self._flights.append(flight)
        self._end_lap()
        if not bound or len(self._flights) == 1:
            self._sample(flight)
        return flight

    def _sample(self, flight: _Flight) -> None:
        """Starts a step's sampler, unless it runs; every earlier token of its bound rows is on the host."""
        if flight.handle.outputs is not None:
            return
        masks = self._grammars.masks(flight.bound, flight.handle.bucket) if flight.bound else None
        try:
            self._runner.sample(flight.handle, masks)
        except Exception as error:
            flight.has_failed = True
            raise StepFailedError("sample", error) from error
        self._end_lap()

    def _take_in(self) -> None:
        """Waits for the oldest step; its tokens go to the scheduler and the requests."""
        flight = self._flights[0]
        bucket = flight.handle.bucket
        output = self._collect(flight)
        if output.broken_decode or output.broken_prefill:
            self._recovery.end_broken(output)
        self._flights.popleft()
        try:
            if flight.bound:
                self._grammars.accept(flight.bound, output.result, bucket)
            if self._flights:
                self._sample(self._flights[0])
        finally:
            # Whatever became of the next step, these tokens are there.
            self._deliver(flight, output)
        self._end_lap()

    def _deliver(self, flight: _Flight, output: StepOutput) -> None:
        plan, bucket, result = flight.plan, flight.handle.bucket, output.result
        name = bucket.name
        with self._lock:
            now = self._clock()
            if flight.scored:
                self._take_prompt_scores(flight, output, now)
            events = self._scheduler.update(plan, result, now, bucket=name)
            self._delivery.take_step(events, output, now)
            self.stats.count(plan, result, bucket, events.num_tokens, events.num_wasted)
            num_tokens = plan.num_prefill_tokens + result.num_decode_tokens
            self._metrics.iteration(num_tokens, events.num_wasted, result.num_steps if plan.decode else 0)
            self._monitor.iteration(plan, name, flight.planned_at, now, tuple(map(len, result.decode_runs)))
            self._recovery.took_in(now)
            self._on_step()

    def _collect(self, flight: _Flight) -> StepOutput:
        began = time.perf_counter()
        try:
            output = self._runner.collect(flight.handle)
        except Exception as error:
            flight.has_failed = True
            raise StepFailedError("collect", error) from error
        self._begin_lap()
        self.stats.device_s += self._lap_began - began
        return output

    # Host time

    def _begin_lap(self) -> None:
        self._lap_began = time.perf_counter()
        self._busy_with = self._runner.newest

    def _end_lap(self) -> None:
        """Counts the host's work since the lap began; the next one begins.

        It was hidden if what the device had been given before is still not done: that is the least that was
        hidden, as a lap counts whole or not at all.
        """
        given, now = self._busy_with, time.perf_counter()
        seconds, self._lap_began, self._busy_with = now - self._lap_began, now, self._runner.newest
        self.stats.host_s += seconds
        if given is not None and not given.is_ready():
            self.stats.hidden_s += seconds

    # What a plan means for requests and metrics

    def _request_of(self, request_id: str) -> Request:
        return self._scheduler.sequence(request_id).request

    def _outputs_of(self, request_id: str) -> list[int]:
        return self._scheduler.sequence(request_id).output_token_ids

    def _mark_scheduled(self, plan: StepPlan, now: float) -> None:
        for placement in plan.placements:
            state = self._delivery.states[placement.request_id]
            if state.metrics.first_scheduled_at is None:
                state.metrics.first_scheduled_at = now
                state.num_cached_tokens = placement.num_cached_tokens
                if self._cached:
                    self._metrics.looked_up(state.request.num_prompt_tokens, placement.num_cached_tokens)
                    self.stats.cache_queries += state.request.num_prompt_tokens
                    self.stats.cache_hits += placement.num_cached_tokens
                self._metrics.queue_time(now - state.metrics.arrived_at)

    def _count_preemptions(self, plan: StepPlan) -> None:
        counters, page_bytes = self._scheduler.counters, self._runner.page_bytes
        swapped = {name: pages * page_bytes for name, pages in counters.swapped_pages_of.items()}
        self._metrics.preempted(len(plan.preempted), counters.recomputed_tokens_of, swapped)

    def _scored(self, plan: StepPlan) -> list[RequestState | None]:
        found = [self._delivery.states.get(chunk.request_id) for chunk in plan.prefill]
        return found if any(state is not None and state.wants_prompt_scores for state in found) else []

    def _take_prompt_scores(self, flight: _Flight, output: StepOutput, now: float) -> None:
        first = 0
        for chunk, state in zip(flight.plan.prefill, flight.scored, strict=True):
            if state is not None and self._delivery.states.get(chunk.request_id) is state:
                try:
                    state.take_prompt_scores(chunk, first, output)
                except RequestFailedError as error:
                    self._metrics.nan_logits()
                    self._delivery.fail(chunk.request_id, error, now, forgets=True)
            first += len(chunk.token_ids)
