"""Lifecycle: how requests come to be live, and how they cease to be.

Arrivals are decided on at once: a slot, a place in the queue, or a refusal with its reason. Arrivals of one
call are taken together or not at all. Whatever their number, the order of trying is the same: free slots,
which take nothing from anybody; a lower class's slot; the queue; a lower class's place in the queue. From
the second on somebody may lose by it, so by then it is certain that everyone still to come has a place.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Rejection, Request
from jaxserve.scheduler.admission import Gate, queue_full
from jaxserve.scheduler.moves import Moves
from jaxserve.scheduler.plan import TokenEvent
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.trace import TraceRecorder


class Lifecycle(Moves):
    """The scheduler's tables, and who enters and leaves them.

    Args:
      config: limits and the names of the policies.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._events: list[TokenEvent] = []  # of ends outside `update`
        self._gate = Gate(config, self._reservation, self._departures, self._step_time)
        self._trace: TraceRecorder | None = None

    def add(self, request: Request, now: float) -> Rejection | None:
        """Places, queues or refuses an arrival.

        Returns:
          None when it was accepted. A refused request leaves no trace but its count.

        Raises:
          ValueError: its prompt is empty.
        """
        return self.add_all([request], now)

    def add_all(self, requests: Items[Request], now: float) -> Rejection | None:
        """Places or queues every one of the arrivals, or refuses them all and disturbs nobody.

        Args:
          requests: at least one, all of one priority, as the choices of one prompt are.

        Returns:
          None when they were accepted; else why there is no place for all of them.

        Raises:
          ValueError: there are none, a prompt is empty, priorities differ, or what is imported is not whole pages, or
            not less than the prompt.
        """
        _check(requests, self.config.page_size)
        sequences = [Sequence(request, number, now) for number, request in enumerate(requests, self._num_arrivals)]
        if self._windows != (0,):
            for sequence in sequences:
                sequence.holdings = self._new_holdings(sequence)
        for sequence in sequences:
            if sequence.request.num_imported_tokens:
                self._await_import(sequence, sequence.request.num_imported_tokens)
        self._num_arrivals += len(sequences)
        self.counters.offered += len(sequences)
        rejection = self._gate_refusal(requests, now)
        if rejection is None:
            for sequence in sequences:
                self._enter(sequence)
            rejection = self._take_in(sequences, now)
        for sequence in sequences:
            if rejection is not None:
                self.counters.count_rejection(rejection.reason)
                continue
            self._live[sequence.request_id] = sequence
            if (deadline_at := sequence.request.deadline_at) is not None:
                self._deadlines.push((deadline_at, sequence.arrival), sequence)
        if self._trace:
            self._trace.added(sequences, now, rejection)
        return rejection

    def abort(self, request_id: str, now: float, reason: str = FinishReason.ABORT, *, forgets: bool = False) -> bool:
        """Ends a live request at any stage; its event is in `take_events`.

        Args:
          reason: ABORT; STOP when a stop string was found, a completion; ERROR or UNFOLLOWABLE when it failed.
          forgets: what its pages hold is broken: nobody is to find it in the prefix cache.

        Returns:
          False when no live request has this id.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        if forgets and self.config.enable_prefix_caching:
            self._forget_pages(sequence)
        self._end_early(sequence, FinishReason(reason), now, forgets=forgets)
        return True

    def refusal_of_any(self, now: float) -> Rejection | None:
        """Why whatever comes now is refused; None when a request may find a place, or take another's."""
        config = self.config
        may_take = config.priority_preemption or config.queue_displacement
        if self.has_slot_to_give or may_take or len(self._waiting) < config.max_queue_requests:
            return None
        return self._queue_full([], "queue_full_requests", now)

    def take_events(self) -> list[TokenEvent]:
        """Ends since the last call that happened outside `update`: aborts and expiries, in order."""
        events, self._events = self._events, []
        return events

    # In

    def _gate_refusal(self, requests: Items[Request], now: float) -> Rejection | None:
        """The first reason against one of them that no slot and no place in the queue could help."""
        seen: set[str] = set()
        for request in requests:
            rejection = self._gate.refusal(
                request,
                is_live=request.request_id in self._live or request.request_id in seen,
                num_waiting=len(self._waiting),
                has_free_slot=self.has_slot_to_give,
                now=now,
            )
            if rejection is not None:
                return rejection
            seen.add(request.request_id)
        return None

    def _take_in(self, sequences: list[Sequence], now: float) -> Rejection | None:
        """Gives each a slot or a place in the queue; else they no longer ask for service."""
        num_placed = 0
        while num_placed < len(sequences) and self._take_free_slot(sequences[num_placed]):
            num_placed += 1
        for index in range(num_placed, len(sequences)):
            sequence, later = sequences[index], sequences[index + 1 :]
            if self._take_lower_slot(sequence, later):
                continue
            # Once one of them has disturbed somebody, those after it have their places: only the first can fail.
            if index == num_placed and (reason := self._waiting.refusal_of_all(sequences[index:])) is not None:
                rejection = self._queue_full(sequences[index:], reason, now)
                self._withdraw(sequences)
                return rejection
            self._enqueue(sequence, now)
        return None

    def _take_free_slot(self, sequence: Sequence) -> bool:
        if not self.has_slot_to_give or not self._may_take_slot(sequence):
            return False
        is_first = self.config.arrivals_claim_slots or self._waiting.would_lead(sequence)
        passed = None if is_first else self._waiting.front()
        if (passed and not self._may_pass(passed, sequence)) or not self._reserve(sequence):
            return False
        if passed:
            passed.num_setbacks += 1
        self._occupy(sequence)
        return True

    def _take_lower_slot(self, sequence: Sequence, later: Items[Sequence]) -> bool:
        """Preempts a request of lower class, if that leaves `later` their places in the queue."""
        if self.has_slot_to_give or not self.config.priority_preemption or not self._may_take_slot(sequence):
            return False
        victim = self._victims.for_slot(sequence, self._running.values())
        # Without pages for the newcomer or a place for the victim it is not disturbed.
        if victim is None or self._waiting.refusal(victim):
            return False
        if later and self._waiting.refusal_of_all(later, beside=victim):
            return False
        if not self._reserve(sequence, victim):
            return False
        self._preempt(victim)
        self._occupy(sequence)
        return True

    def _may_take_slot(self, sequence: Sequence) -> bool:
        """Whether arrivals take slots now, and arrivals of its class."""
        if self._waiting.held:
            return False
        if not self._batching.refills or self._class_is_full(sequence.request.service_class):
            return False
        return not self._waiting.is_beyond_bound

    def _may_pass(self, front: Sequence, sequence: Sequence) -> bool:
        """Whom it could preempt the moment after, it need not let pass first; passing counts like preempting."""
        outranks = front.request.priority > sequence.request.priority
        return self.config.priority_preemption and outranks and not self._victims.protects(front)

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        """Puts it in the queue, in the place of another where there is no room."""
        if self._waiting.refusal(sequence) is not None:
            displaced = self._waiting.displaceable(sequence)
            assert displaced is not None, f"{sequence.request_id} has no place, which was to be seen before"
            self._end_early(displaced, FinishReason.DISPLACED, now)
        self._waiting.push(sequence)

    def _withdraw(self, sequences: Items[Sequence]) -> None:
        """Takes back the slots of those that have one; none is live yet, nor has any run."""
        for sequence in reversed(sequences):
            if sequence.slot != NO_SLOT:
                self.counters.cached_tokens -= sequence.num_cached_tokens
                self._vacate(sequence)
                self._release_pages(sequence)
            self._leave(sequence)

    def _queue_full(self, sequences: Items[Sequence], reason: str, now: float) -> Rejection:
        waiting = self._waiting
        num_tokens = sum(sequence.max_total_tokens for sequence in sequences)
        excess = max(waiting.num_tokens + num_tokens - self.config.max_queue_tokens, 0)
        retry_after_s = self._departures.seconds_until(max(len(waiting), 1), excess, now)
        return queue_full(self.config, waiting, sequences, reason, retry_after_s)

    # Out

    def _expire(self, now: float) -> None:
        while (front := self._deadlines.front()) and front[0][0] <= now:
            self._end_early(front[1], FinishReason.EXPIRED, now)

    def _end_early(self, sequence: Sequence, reason: FinishReason, now: float, *, forgets: bool = False) -> None:
        self._end(sequence, reason, now, early=True, forgets=forgets)
        self._events.append(TokenEvent(sequence.request_id, None, finish_reason=reason))

    def _end(
        self, sequence: Sequence, reason: FinishReason, now: float, *, early: bool = False, forgets: bool = False
    ) -> None:
        """The one way out of being live, from any state."""
        sequence.finish_reason = reason
        del self._live[sequence.request_id]
        self._deadlines.remove(sequence)
        if not self._waiting.remove(sequence) and sequence.slot != NO_SLOT:
            self._vacate(sequence)
        self._release_pages(sequence)
        self._free_host_pages(sequence)
        self._leave(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.observe(len(sequence.output_token_ids))
        self.counters.count_end(reason)
        self._departures.observe(now, sequence.max_total_tokens)
        if self._trace:
            self._trace.ended(sequence, now, early=early, forgets=forgets)


def _check(requests: Items[Request], page_size: int) -> None:
    if not requests:
        raise ValueError("no request is given; there must be at least one")
    for request in requests:
        if not request.prompt_token_ids:
            raise ValueError(f"prompt of {request.request_id} has 0 tokens; it must have at least 1")
        imported = request.num_imported_tokens
        if imported and not (0 < imported < request.num_prompt_tokens and imported % page_size == 0):
            raise ValueError(
                f"{request.request_id} imports {imported} of {request.num_prompt_tokens} prompt tokens; it must be"
                f" whole pages of {page_size} and fewer than all"
            )
        if imported and request.params.prompt_logprobs is not None:
            raise ValueError(f"{request.request_id} wants its prompt scored, so none of it can be imported")
    if any(request.priority != requests[0].priority for request in requests[1:]):
        priorities = sorted({request.priority for request in requests})
        raise ValueError(f"requests that come together have priorities {priorities}; they must have one")
