"""EngineMonitor: what operators look at, recorded by the engine as it runs.

Everything here is called under the engine's lock and costs an iteration a few object constructions, whatever the
length of the queue. Readers get frozen values; whoever takes long with them holds up nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import islice

from jaxserve.core import (
    ChunkView,
    EngineTotals,
    EngineView,
    EventView,
    FinishReason,
    IterationView,
    Recording,
    Request,
    RequestMetrics,
    RequestRecord,
    SlotView,
    WaitingView,
)
from jaxserve.engine.output_processor import RequestState
from jaxserve.engine.stats import EngineStats
from jaxserve.scheduler import Scheduler, StepPlan
from jaxserve.scheduler.sequence import Sequence

QUEUE_SHOWN = 20
"""Requests of the queue that a view lists."""
_EVENTS = {FinishReason.ABORT: "aborted", FinishReason.EXPIRED: "expired", FinishReason.DISPLACED: "rejected"}

RequestListener = Callable[[RequestRecord], None]
"""Told of each end on the engine's or a submitting thread, under the engine's lock: it must return at once."""


class EngineMonitor:
    """Keeps the last iterations and tells a listener of ended requests.

    Args:
      scheduler: of the engine.
      model: its name.

    Attributes:
      on_request_end: the listener.
    """

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler = scheduler
        self._model = model
        self._iterations: deque[IterationView] = deque(maxlen=0)
        self._events: deque[EventView] = deque(maxlen=0)
        self._last_ended_at = -math.inf
        self.on_request_end: RequestListener | None = None

    def keep(self, num_iterations: int) -> None:
        """Remembers so many iterations from now on, and as many events; 0: none."""
        self._iterations = deque(self._iterations, maxlen=num_iterations)
        self._events = deque(self._events, maxlen=num_iterations)

    def iteration(
        self, plan: StepPlan, bucket: str, planned_at: float, now: float, decode_tokens: tuple[int, ...] = ()
    ) -> None:
        """A step came back at `now`. One planned while another ran is taken to begin when that came back.

        Args:
          decode_tokens: of each decode row, where the plan had several steps.
        """
        began_at, self._last_ended_at = max(planned_at, self._last_ended_at), now
        if not self._iterations.maxlen:
            return
        scheduler, rows = self._scheduler, plan.decode
        chunks = tuple(ChunkView(chunk.slot, chunk.request_id, len(chunk.token_ids)) for chunk in plan.prefill)
        self._iterations.append(
            IterationView(
                plan.iteration,
                began_at,
                now,
                bucket,
                rows.slots,
                rows.request_ids,
                chunks,
                tuple(placement.slot for placement in plan.placements),
                plan.preempted,
                planned_at,
                scheduler.num_waiting,
                scheduler.pages_free,
                scheduler.pages_cached,
                scheduler.pages_owned,
                decode_tokens,
            )
        )

    def ended(self, state: RequestState, reason: str, now: float) -> None:
        """A live request ended."""
        if (name := _EVENTS.get(FinishReason(reason))) is not None:
            self._events.append(EventView(name, now, state.request.request_id, reason))
        if self.on_request_end is not None:
            self.on_request_end(
                RequestRecord(
                    state.request,
                    state.index,
                    reason,
                    reason == FinishReason.DISPLACED,
                    state.metrics,
                    state.last_token_at,
                    state.num_output_tokens,
                    state.num_cached_tokens,
                    state.cause,
                )
            )

    def rejected(self, request: Request, index: int, reason: str, now: float) -> None:
        """An arrival was refused."""
        self._events.append(EventView("rejected", now, request.request_id, reason))
        if self.on_request_end is not None:
            self.on_request_end(RequestRecord(request, index, reason, True, RequestMetrics(now), None, 0, 0))

    def recording(self, num_iterations: int, since: float) -> Recording:
        """At most so many iterations, none that ended before `since`, and the events of that time."""
        newest = islice(reversed(self._iterations), num_iterations)
        kept = [each for each in newest if each.ended_at >= since][::-1]
        # The events between the iterations shown; what happened since the last one is shown too.
        cut = num_iterations < len(self._iterations) or (kept and kept[0] is not self._iterations[0])
        first = max(since, kept[0].began_at) if kept and cut else since
        events = tuple(event for event in self._events if event.now >= first)
        return Recording(self._model, self._scheduler.config.max_num_seqs, tuple(kept), events)

    def view(self, stats: EngineStats, now: float, num_iterations: int) -> EngineView:
        """The state now, with the last `num_iterations` of those kept; the work grows with the slots alone."""
        scheduler = self._scheduler
        config = scheduler.config
        return EngineView(
            now=now,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            max_num_seqs=config.max_num_seqs,
            page_size=config.page_size,
            pages_total=config.num_pages - 1,
            pages_free=scheduler.pages_free,
            pages_cached=scheduler.pages_cached,
            pages_owned=scheduler.pages_owned,
            totals=self.totals(stats),
            slots=tuple(_slot(sequence, now) for sequence in scheduler.holders),
            queue=tuple(_waiting(sequence, now) for sequence in scheduler.first_waiting(QUEUE_SHOWN)),
            iterations=tuple(islice(reversed(self._iterations), num_iterations))[::-1],
        )

    def totals(self, stats: EngineStats) -> EngineTotals:
        """The sums now."""
        counters = self._scheduler.counters
        return EngineTotals(
            iterations=stats.iterations,
            steps=stats.steps,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.tokens - stats.prefill_tokens,
            output_tokens=stats.output_tokens,
            preemptions=counters.preemptions,
            prefix_cache_queries=stats.cache_queries,
            prefix_cache_hits=stats.cache_hits,
            offered=counters.offered,
            completed=counters.completed,
            rejected=counters.num_rejected,
            expired=counters.expired,
            aborted=counters.aborted,
            failed=counters.failed,
        )


def _slot(sequence: Sequence, now: float) -> SlotView:
    request = sequence.request
    return SlotView(
        slot=sequence.slot,
        request_id=sequence.request_id,
        phase="decode" if sequence.decode_ready else "prefill",
        prompt_tokens=sequence.num_prompt_tokens,
        computed_tokens=sequence.num_scheduled,
        output_tokens=len(sequence.output_token_ids),
        max_tokens=sequence.max_tokens,
        cached_tokens=sequence.num_cached_tokens,
        pages=sequence.num_held_pages,
        preemptions=sequence.num_preemptions,
        priority=request.priority,
        tenant=request.tenant,
        service_class=request.service_class,
        age_s=max(now - sequence.arrived_at, 0.0),
    )


def _waiting(sequence: Sequence, now: float) -> WaitingView:
    request = sequence.request
    return WaitingView(
        request_id=sequence.request_id,
        prompt_tokens=sequence.num_prompt_tokens,
        max_tokens=sequence.max_tokens,
        preemptions=sequence.num_preemptions,
        priority=request.priority,
        tenant=request.tenant,
        service_class=request.service_class,
        age_s=max(now - sequence.arrived_at, 0.0),
    )
