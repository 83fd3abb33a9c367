"""The scheduler: which request does what in the next iteration.

It is a pure function of (state, events, clock). It never reads a clock, draws a random number, waits,
logs or touches a device; every instant comes in as `now`. The same calls give the same plans, in serving,
in simulation and in replay.

    scheduler.add(request, now)              an arrival is placed, queued or refused at once
    plan = scheduler.schedule(now)           one iteration, as data
    ...                                      the device runs it
    events = scheduler.update(plan, result, now)

States of a request
-------------------
    add ─┬─ refused, never live
         ├─ no slot ────▶ WAITING ◀─preempted─┐
         │                   └────promoted──▶ │
         └─ slot free ──────────────────────▶ RUNNING ─last row planned─▶ LANDING ─it came back─▶ ended

    WAITING   in the queue. Holds no slot; pages only if it was paused.
    RUNNING   holds a slot. Every plan carries it while the token budget lasts.
    LANDING   needs no further plan. Its slot is free for the next one, its last step is in flight.
    Any live state ends at once by a stop id, abort or deadline.

Order of one iteration
----------------------
1. Events in order of time and arrival: aborts and arrivals by their calls, expired deadlines when
   `schedule` begins.
2. An arrival takes a free slot at once if nobody waits ahead of it, or if `arrivals_claim_slots` lets it
   pass the queue. Under `priority_preemption` it also passes a front of lower class, and without a free
   slot it takes a lower class's, if the victim's place in the queue exists and pages for it are free.
3. Else it is queued, or refused with a reason: both bounds of the queue hold at all times.
4. The queue's front is promoted while slots are free and the reservation finds pages. Nobody in the
   queue overtakes a front that does not fit.
5. Every decode-ready slot gets its token before any prompt gets one.
6. The rest of the token budget goes to prompts in promotion order, at most `prefill_chunk` each and
   `max_prefill_seqs` of them.
7. A prompt that ends emits its first token in that iteration; the finished leave when it is updated.

Steps in flight
---------------
`schedule` may run ahead of `update`. It counts what it planned as done (`Sequence.num_scheduled`), so it
knows ends by length without waiting; ends by stop id it learns late, and the tokens sampled beyond them
are dropped. Updates come in the order of the plans.

The device runs steps in order and results return by row, not by slot. So a slot is free for the next
plan as soon as its holder needs no more rows. A page is freed later, when no step in flight can touch
it, because pages are also read and moved outside the step stream.

What may never happen
---------------------
- More tokens in a plan than the budget; a chunk longer than the limit; a prompt token while a
  decode-ready slot goes without.
- An empty plan while some request holds a slot.
- A page owned twice, or page 0 owned; a running request without a page for its next token.
- A request left waiting for ever: every step either gives the front a slot or brings a holder nearer its end.
- A queue beyond a bound; a live request in no state or in two.
- offered ≠ completed + rejected + expired + aborted + failed + live.
- Work in an iteration that grows with the queue's length.
`check_invariants` asserts these after every step of every test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Rejection, Request
from jaxserve.scheduler import admission
from jaxserve.scheduler.plan import DecodeRow, PageUpdate, Placement, PrefillChunk, StepPlan, StepResult, TokenEvent
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.state import Flight, SchedulerState
from jaxserve.scheduler.trace import TraceRecorder


class Scheduler(SchedulerState):
    """Plans iterations for one engine.

    Args:
      config: limits and the names of the policies.
      trace: gets one JSON-able record per iteration, see `jaxserve.scheduler.trace`; no record is built
        without it.
    """

    def __init__(self, config: SchedulerConfig, trace: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(config)
        self._events: list[TokenEvent] = []
        self._trace = TraceRecorder(self, trace) if trace else None

    # Arrivals and aborts

    def add(self, request: Request, now: float) -> Rejection | None:
        """Places, queues or refuses an arrival.

        Returns:
          None when it was accepted. A refused request leaves no trace but its count.

        Raises:
          ValueError: its prompt is empty.
        """
        if not request.prompt_token_ids:
            raise ValueError(f"prompt of {request.request_id} has 0 tokens; it must have at least 1")
        sequence = Sequence(request, self._num_arrivals, now)
        self._num_arrivals += 1
        self.counters.offered += 1
        rejection = self._unacceptable(request, now)
        if rejection is None and not self._place(sequence):
            rejection = self._enqueue(sequence, now)
        if rejection is not None:
            self.counters.count_rejection(rejection.reason)
        else:
            self._live[request.request_id] = sequence
            if request.deadline_at is not None:
                self._deadlines.push((request.deadline_at, sequence.arrival), sequence)
        if self._trace:
            self._trace.added(sequence, now, rejection)
        return rejection

    def abort(self, request_id: str, now: float, reason: str = FinishReason.ABORT) -> bool:
        """Ends a live request at any stage; its event is in `take_events`.

        Args:
          reason: ABORT; STOP when a stop string was found, a completion; ERROR when it failed.

        Returns:
          False when no live request has this id.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end_early(sequence, FinishReason(reason), now)
        return True

    def take_events(self) -> list[TokenEvent]:
        """Ends since the last call that happened outside `update`: aborts and expiries, in order."""
        events, self._events = self._events, []
        return events

    # One iteration

    def schedule(self, now: float) -> StepPlan:
        """Plans the next iteration and counts it as done.

        Returns:
          An empty plan, not to be dispatched or updated, when no request holds a slot.
        """
        self._expire(now)
        self._promote()
        if not self._running:
            return StepPlan(self._num_plans)
        placements, pages = self._new_placements()
        running = list(self._running.values())
        decoding = [sequence for sequence in running if sequence.decode_ready]
        prefilling = [sequence for sequence in running if not sequence.decode_ready]
        rows = [self._decode_row(sequence, pages) for sequence in decoding]
        chunks = self._prefill_chunks(prefilling, self.config.max_num_batched_tokens - len(rows), pages)
        plan = StepPlan(
            iteration=self._num_plans,
            decode=tuple(rows),
            prefill=tuple(chunks),
            placements=tuple(placements),
            pages=tuple(pages),
            preempted=tuple(self._preempted),
        )
        flight = Flight(plan, now, decoding, prefilling[: len(chunks)])
        for sequence in (*flight.decode, *flight.prefill):
            self._depart(sequence, now)
        self._in_flight.append(flight)
        self._preempted = []
        self._num_plans += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float, bucket: Any = None) -> list[TokenEvent]:
        """Takes in what the device answered to the oldest plan in flight.

        Args:
          bucket: the compiled shape it ran in, for the trace.

        Returns:
          New tokens and ends of live requests, in row order: decode rows, then chunks.
        """
        assert self._in_flight, f"plan {plan.iteration} is updated, but none is in flight"
        flight = self._in_flight.popleft()
        assert flight.plan.iteration == plan.iteration, (
            f"plan {plan.iteration} is updated before plan {flight.plan.iteration}"
        )
        events: list[TokenEvent] = []
        for row, (sequence, token) in enumerate(zip(flight.decode, result.decode_tokens, strict=True)):
            self._land(sequence, token, "decode", row, now, events)
        chunks = zip(flight.prefill, plan.prefill, result.prefill_tokens, strict=True)
        for row, (sequence, chunk, token) in enumerate(chunks):
            self._land(sequence, token if chunk.emits else None, "prefill", row, now, events)
        if self._trace:
            self._trace.iteration(plan, flight.now, bucket)
        return events

    def flush_trace(self) -> None:
        """Records arrivals and ends since the last iteration, which otherwise wait for the next one."""
        if self._trace:
            self._trace.flush()

    # Placing

    def _unacceptable(self, request: Request, now: float) -> Rejection | None:
        """Reasons that neither a free slot nor a place in the queue can mend."""
        rejection = admission.never_fits(self.config, request, self._reservation.pages_needed(request))
        if rejection is not None:
            return rejection
        if request.request_id in self._live:
            return admission.duplicate_id(request)
        if request.deadline_at is not None and request.deadline_at <= now:
            return admission.deadline_passed(request.deadline_at, now)
        return None

    def _place(self, sequence: Sequence) -> bool:
        """Gives an arrival a slot, a free one or a lower class's; changes nothing when it cannot."""
        if self._slots.num_free:
            if not self._may_take_free_slot(sequence) or not self._reservation.reserve(sequence):
                return False
        else:
            if not self.config.priority_preemption:
                return False
            victim = self._preemption.victim(sequence, self._running.values())
            # The victim keeps its pages and waits: without pages for the newcomer or a place for the
            # victim it is not disturbed.
            if victim is None or self._waiting.refusal(victim) or not self._reservation.reserve(sequence):
                return False
            self._preempt(victim)
        self._occupy(sequence)
        return True

    def _may_take_free_slot(self, sequence: Sequence) -> bool:
        if self.config.arrivals_claim_slots or self._waiting.would_lead(sequence):
            return True
        # Whom it could preempt the moment after, it need not let pass first.
        front = self._waiting.front()
        outranks = front is not None and front.request.priority > sequence.request.priority
        return outranks and self.config.priority_preemption

    def _enqueue(self, sequence: Sequence, now: float) -> Rejection | None:
        waiting = self._waiting
        reason = waiting.refusal(sequence)
        if reason is None:
            waiting.push(sequence)
            return None
        excess = max(waiting.num_tokens + sequence.max_total_tokens - self.config.max_queue_tokens, 0)
        retry_after_s = self._departures.seconds_until(max(len(waiting), 1), excess, now)
        return admission.queue_full(self.config, waiting, sequence, reason, retry_after_s)

    def _promote(self) -> None:
        while self._slots.num_free:
            sequence = self._waiting.front()
            if sequence is None or not sequence.resumable or not self._reservation.reserve(sequence):
                return
            self._waiting.remove(sequence)
            self._occupy(sequence)

    # Planning

    def _new_placements(self) -> tuple[list[Placement], list[PageUpdate]]:
        """Of the requests that took a slot since the last plan, with the pages they bring along."""
        placements, pages = [], []
        for slot, sequence in self._unplaced.items():
            outputs = len(sequence.output_token_ids)
            placements.append(Placement(sequence.request_id, slot, outputs, sequence.last_token_id))
            if sequence.pages:
                pages.append(PageUpdate(slot, 0, tuple(sequence.pages)))
        self._unplaced = {}
        return placements, pages

    def _decode_row(self, sequence: Sequence, pages: list[PageUpdate]) -> DecodeRow:
        row = DecodeRow(sequence.request_id, sequence.slot, position=sequence.num_scheduled)
        self._advance(sequence, 1, pages)
        return row

    def _prefill_chunks(self, sequences: list[Sequence], budget: int, pages: list[PageUpdate]) -> list[PrefillChunk]:
        """Chunks of the first of `sequences`, as many as the budget reaches."""
        chunks: list[PrefillChunk] = []
        for sequence in sequences[: self.config.max_prefill_seqs]:
            if budget <= 0:
                break
            start = sequence.num_scheduled
            end = min(sequence.num_prompt_tokens, start + self.config.prefill_chunk, start + budget)
            chunks.append(
                PrefillChunk(
                    request_id=sequence.request_id,
                    slot=sequence.slot,
                    start=start,
                    token_ids=sequence.request.prompt_token_ids[start:end],
                    emits=end == sequence.num_prompt_tokens and sequence.request.max_tokens > 0,
                )
            )
            self._advance(sequence, end - start, pages)
            budget -= end - start
        return chunks

    # Ending

    def _expire(self, now: float) -> None:
        while (front := self._deadlines.front()) and front[0][0] <= now:
            self._end_early(front[1], FinishReason.EXPIRED, now)

    def _land(
        self, sequence: Sequence, token: int | None, source: str, row: int, now: float, events: list[TokenEvent]
    ) -> None:
        """One row of a step came back; `token` is None for a chunk that emits nothing."""
        sequence.num_in_flight -= 1
        if sequence.finish_reason is not None:
            self._release_pages(sequence)
            return
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        if token is not None:
            sequence.output_token_ids.append(token)
            count = len(sequence.output_token_ids)
            if token in sequence.stop_ids and count > sequence.request.params.min_tokens:
                reason, stop_token_id = FinishReason.STOP, token
            elif count == sequence.request.max_tokens:
                reason = FinishReason.LENGTH
        elif sequence.fully_scheduled and not sequence.num_in_flight:
            reason = FinishReason.LENGTH  # max_tokens is 0: the prompt's scores were all it asked for
        if reason is not None:
            self._end(sequence, reason, now)
        if token is not None or reason is not None:
            events.append(TokenEvent(sequence.request_id, token, source, row, reason, stop_token_id))

    def _end_early(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._end(sequence, reason, now, early=True)
        self._events.append(TokenEvent(sequence.request_id, None, finish_reason=reason))

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, *, early: bool = False) -> None:
        """The one way out of being live, from any state."""
        sequence.finish_reason = reason
        del self._live[sequence.request_id]
        self._deadlines.remove(sequence)
        if not self._waiting.remove(sequence) and sequence.slot != NO_SLOT:
            self._vacate(sequence)
        self._release_pages(sequence)
        self.counters.count_end(reason)
        self._departures.observe(now, sequence.max_total_tokens)
        if self._trace:
            self._trace.ended(sequence, now, early=early)
