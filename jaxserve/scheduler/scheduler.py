"""The scheduler: which request does what in the next iteration.

It is a pure function of (state, events, clock). It never reads a clock, draws a random number, waits,
logs or touches a device; every instant comes in as `now`. The same calls give the same plans, in serving,
in simulation and in replay.

    scheduler.add(request, now)              an arrival is placed, queued or refused at once (`Lifecycle`)
    plan = scheduler.schedule(now)           one iteration, as data
    ...                                      the device runs it
    events = scheduler.update(plan, result, now)

States of a request
-------------------
    add ─┬─ refused, never live
         ├─ no slot ────▶ WAITING ◀─preempted─┐
         │                   └────promoted──▶ │
         └─ slot free ──────────────────────▶ RUNNING ─last row planned─▶ LANDING ─it came back─▶ ended

    WAITING   in the queue. Holds no slot; pages only if it was paused. A swap keeps them on the host, a
              recompute loses them.
    RUNNING   holds a slot. Every plan carries it while the token budget, and the pages, last.
    LANDING   needs no further plan. Its slot is free for the next one, its last step is in flight.
    Any live state ends at once by a stop id, abort or deadline.

Order of one iteration
----------------------
1. Events in order of time and arrival: aborts and arrivals by their calls, expired deadlines when
   `schedule` begins.
2. An arrival takes a free slot at once if nobody waits ahead of it, or if `arrivals_claim_slots` lets it
   pass the queue. Under `priority_preemption` it also passes a front of lower class, and without a free
   slot it takes a lower class's, if the victim's place in the queue exists and pages for it are free.
3. Else it is queued, displaces a queued request of lower class where that is allowed, or is refused with
   a reason: the bounds of the queue hold for every arrival. Arrivals that come in one call are all taken or
   all refused, and before it is sure which, nobody loses a place to them.
4. Under a reservation that grows, every decode row that begins a page is promised one first; where there
   is none, a victim gives up its pages. In an iteration with a preemption nobody is promoted.
5. The queue's front is promoted while slots are free and the reservation finds pages. Nobody in the
   queue overtakes a front that does not fit, but a paused request, which lacks nothing.
6. Every decode-ready slot gets its token before any prompt gets one.
7. The rest of the token budget, or of the step time, goes to prompts in promotion order, at most
   `prefill_chunk` each and `max_prefill_seqs` of them.
8. A prompt that ends emits its first token in that iteration; the finished leave when it is updated.
9. A plan has one decode step. It has several, up to `max_decode_steps`, only where no prompt is left to
   compute, nobody waits, unless for a slot that no step but the last is known to free, every row can go on
   without the host (`Request.free_running`), pages for all of them are there, and an arrival loses no more
   than `max_arrival_delay_s` to them: the device then feeds each row's tokens back itself, and stops a row at
   its own length or at an id that ends it.

Steps in flight
---------------
`schedule` may run ahead of `update`. It counts what it planned as done (`Sequence.num_scheduled`), so it
knows ends by length without waiting; ends by stop id it learns late, and the tokens sampled beyond them
are dropped. Updates come in the order of the plans.

The device runs steps in order and results return by row, not by slot. So a slot is free for the next
plan as soon as its holder needs no more rows. A page is freed later, when no step in flight can touch
it, but for those of a swapped request: their copy to the host stands in the stream, before their next use;
and for those that a sliding window has left behind: no plan reads them from the one on whose first token
of the request does not see them, and `schedule` begins by giving them back.

K/V from elsewhere
------------------
A request may come with K/V of its prompt's first pages (`num_imported_tokens`), computed by another engine. It waits
and is promised pages like any other, its imported tokens counting as scheduled; the plan that places it says which
pages they go to. One that loses its slot before that plan is as it came. A request that `exports_kv` has every page of
its prompt copied out by the plan that fills it, so it owns no page longer than others do.

What may never happen
---------------------
- More tokens in a plan than the budget; a chunk longer than the limit; a prompt token while a
  decode-ready slot goes without.
- An empty plan while some request holds a slot, unless all lack pages that a step in flight is to return.
- A page of two owners that the prefix cache did not join, or of two groups of layers, or page 0 owned; more pages
  promised than there are.
- A page given back that a row to come sees; more pages held at once in a group than a chunk and its window span.
- A request left waiting for ever: every step either gives the front a slot or brings a holder nearer its end,
  and between two preemptions a request gains a token.
- A plan of several steps while somebody waits; a token of it beyond its request's end.
- A queue beyond a bound (those who lost their pages may come back to a full one, but live requests never
  exceed slots and bound together); a live request in no state or in two.
- offered ≠ completed + rejected + expired + aborted + failed + live.
- Work in an iteration that grows with the queue's length.
`check_invariants` asserts these after every step of every test; `test_work_per_iteration` counts the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler.failed_steps import FailedSteps
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.prompt_choice import PromptChoice
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.state import Flight
from jaxserve.scheduler.step_choice import StepChoice
from jaxserve.scheduler.step_time import attended_pairs
from jaxserve.scheduler.token_events import TokenEvents
from jaxserve.scheduler.trace import TraceRecorder
from jaxserve.scheduler.waits_for import WaitsFor


class Scheduler(FailedSteps):
    """Plans iterations for one engine.

    Args:
      config: limits and the names of the policies.
      trace: gets one JSON-able record per iteration, see `jaxserve.scheduler.trace`; no record is built
        without it.
    """

    def __init__(self, config: SchedulerConfig, trace: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(config)
        self._prompts = PromptChoice(config, self._step_time, self._num_slots_held)
        self._step_choice = StepChoice(config, self._step_time)
        self._updated_at = -math.inf
        if trace:
            self._trace = TraceRecorder(self, trace)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt's beginning that the prefix cache has now; nothing changes by asking."""
        sequence = Sequence(request, -1, 0.0)
        sequence.holdings = self._new_holdings(sequence)
        found = self._cached_pages(sequence)
        return min([first + len(pages) for first, pages in found]) * self.config.page_size if found else 0

    def gathers(self, now: float) -> bool:
        """Whether nothing runs, on purpose: the batch that waits is to fill, for `batch_timeout_s` at most."""
        if len(self._live) > len(self._waiting):
            return False
        front = self._waiting.front()
        return front is not None and not self._may_fill(front, now)

    def reset_prefix_cache(self, now: float) -> None:
        """Forgets what every page holds: nothing that ran before is shared with what comes."""
        self._pages.drop_cache()
        if self._trace:
            self._trace.cache_reset(now)

    # One iteration

    def schedule(self, now: float) -> StepPlan:
        """Plans the next iteration and counts it as done.

        Returns:
          An empty plan, not to be dispatched or updated, when no request holds a slot, or none of those that
          do has a page to write to before a step in flight has landed.
        """
        assert len(self._in_flight) <= self.config.max_steps_ahead, (
            f"{len(self._in_flight)} plans are in flight; the limit is {self.config.max_steps_ahead} (max_steps_ahead)"
        )
        self._expire(now)
        num_preempted = len(self._preempted)
        plan = self._plan(now)
        if self._trace and plan.empty and len(self._preempted) > num_preempted:
            self._trace.starved(now)
        return plan

    def _plan(self, now: float) -> StepPlan:
        if self._passing:
            self._pass_pages()
        starved = self._secure_pages() if self._reservation.grows else ()
        waits_for = self._promote(now)
        if not self._running:
            return StepPlan(self._num_plans)
        placements, pages = self._new_placements()
        for sequence in starved:
            self._decoding.leave(sequence)
        decoding = self._decoding.sequences.copy()
        chosen = (
            self._prompts.choose(self._prefilling.values(), len(decoding), self._budget) if self._prefilling else []
        )
        num_steps = 1 if starved else self._num_steps(waits_for)
        rows, last_rows = self._decode_rows(pages) if num_steps == 1 else self._decode_runs(num_steps, pages)
        chunks = [self._chunk(sequence, size, pages, now) for sequence, size in chosen]
        for sequence in starved:
            self._decoding.join(sequence)
        plan = StepPlan(
            iteration=self._num_plans,
            decode=rows,
            prefill=tuple(chunks),
            placements=tuple(placements),
            pages=tuple(pages),
            preempted=tuple(self._preempted),
            swaps=tuple(self._swaps),
            num_steps=num_steps,
            imports=tuple(self._imports),
            exports=tuple(self._exports),
        )
        if not plan.empty:
            self._in_flight.append(
                Flight(plan, now, decoding, [sequence for sequence, _ in chosen], last_rows, waits_for)
            )
            self._preempted = []
            self._swaps = []
            self._imports, self._exports = [], []
            self._passed = []
            self._num_plans += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float, bucket: Any = None) -> TokenEvents:
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
        self._observe_step_time(flight, result, now)
        self._updated_at = now
        if self.config.enable_prefix_caching:
            self._remember_written(flight)
        if plan.num_steps == 1:
            events = self._land_decode(flight, result.decode_tokens, now)
        else:
            events = self._land_runs(flight, result.decode_runs, now)
        self._land_prefill(flight, result.prefill_tokens, now, events)
        self.counters.wasted_rows += events.num_wasted
        if self._trace:
            self._trace.iteration(flight, result, bucket)
        return events

    def _observe_step_time(self, flight: Flight, result: StepResult, now: float) -> None:
        plan, num_steps = flight.plan, result.num_steps
        if not num_steps:  # every row had ended before it began
            return
        seconds = (now - max(flight.now, self._updated_at)) / num_steps
        if not self._step_time.fits:
            if not plan.num_copied_pages:
                self._step_time.observe_fastest(seconds)
            return
        pairs = sum([attended_pairs(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill])
        num_swapped = plan.num_copied_pages
        num_rows = len(plan.decode) if plan.num_steps == 1 else result.num_decode_tokens / num_steps
        self._step_time.observe(num_rows, plan.num_prefill_tokens, seconds, pairs=pairs, num_swapped=num_swapped)

    def flush_trace(self) -> None:
        """Records arrivals and ends since the last iteration, which otherwise wait for the next one."""
        if self._trace:
            self._trace.flush()

    # Steps, promotion and pages

    def _num_steps(self, waits_for: WaitsFor | None) -> int:
        """Decode steps of the plan that is being made; see rule 9."""
        batch = self._decoding
        if self._budget < self.config.max_num_batched_tokens:
            return 1
        if not self._step_choice.may_run_several or not len(batch) or batch.num_bound:
            return 1
        if self._prefilling or waits_for not in (None, WaitsFor.SLOT) or self._swaps:
            return 1
        most = self._step_choice.most(len(batch), self._prompts.target_s(()))
        if most > 1:
            left = [each.num_kv_tokens - each.num_scheduled for each in batch.sequences]
            # A slot that somebody waits for is to be free as soon as it would be.
            most = min(most, min(left) if waits_for is WaitsFor.SLOT else max(left))
        return self._reservation.steps_within(batch.sequences, most) if most > 1 else 1

    def _promote(self, now: float) -> WaitsFor | None:
        """Gives free slots to the queue's front for as long as it fits.

        Returns:
          What the front waits for then; None when nobody waits.
        """
        if not len(self._waiting):
            return None
        if not self.has_slot_to_give:
            return WaitsFor.SLOT
        if self._preempted and self._running:
            return WaitsFor.PREEMPTION  # what was given back is for those that run
        front = self._waiting.front()
        if front is not None and not self._may_fill(front, now):
            return WaitsFor.BATCH
        while front is not None:
            if not self.has_slot_to_give:
                return WaitsFor.SLOT
            if not front.resumable:
                return WaitsFor.STEP
            if not self._reserve(front):
                # A paused one needs no page it does not have, and its end brings the front nearer to its own.
                front = self._waiting.paused()
                if front is None or not front.resumable or not self._reserve(front):
                    return WaitsFor.PAGES
            self._waiting.remove(front)
            self._occupy(front)
            front = self._waiting.front()
        if not len(self._waiting):
            return None
        return WaitsFor.RELEASE if self._waiting.held else WaitsFor.CLASS

    def _may_fill(self, front: Sequence, now: float) -> bool:
        num_busy = len(self._live) - len(self._waiting)
        return self._batching.may_fill(num_busy, len(self._waiting), now - front.arrived_at)

    def _secure_pages(self) -> list[Sequence]:
        """Finds a page for every decode row that needs a new one, at other requests' expense if it must.

        Returns:
          Those that keep their slots and go without a row in this iteration: the pages they are to get are not
          back yet.
        """
        starved: list[Sequence] = []
        self._returning = [sequence for sequence in self._returning if sequence.num_in_flight]
        page_size = self.config.page_size
        for sequence in [sequence for sequence in self._decoding.sequences if not sequence.num_scheduled % page_size]:
            # A slot may have been lost to an earlier one's need.
            if sequence.slot == NO_SLOT or all([holding.num_promised for holding in sequence.holdings]):
                continue
            while not self._reservation.grow(sequence):
                victim = None if self._returning else self._victims.for_pages(self._running.values())
                if victim is not None:
                    self._preempt(victim)
                    if victim.num_in_flight and victim.num_held_pages:
                        self._returning.append(victim)
                if victim is None:
                    starved.append(sequence)
                if victim is None or victim is sequence:
                    break
        return starved
