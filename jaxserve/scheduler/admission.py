"""Admission: reasons to refuse an arrival, each with a message for the client."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.core import Rejection, Request
from jaxserve.scheduler.counters import DepartureRate
from jaxserve.scheduler.reservations import Reservation
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Gate:
    """Refuses arrivals that neither a free slot nor a place in the queue could help.

    Args:
      config: limits and policies.
      reservation: knows the pages a request needs in all.
      departures, step_time: the pace of late.
    """

    def __init__(
        self, config: SchedulerConfig, reservation: Reservation, departures: DepartureRate, step_time: StepTimeModel
    ) -> None:
        self._config = config
        self._reservation = reservation
        self._departures = departures
        self._step_time = step_time
        self._classes = ("", *(service_class.name for service_class in config.service_classes))

    def refusal(
        self, request: Request, *, is_live: bool, num_waiting: int, has_free_slot: bool, now: float
    ) -> Rejection | None:
        """The first reason against `request`, if there is one.

        Args:
          is_live: its id belongs to a live request.
        """
        rejection = never_fits(self._config, request, self._reservation.pages_needed(request))
        if rejection is not None:
            return rejection
        if is_live:
            return duplicate_id(request)
        if request.service_class not in self._classes:
            return unknown_class(request, self._classes)
        if request.deadline_at is None:
            return None
        if request.deadline_at <= now:
            return deadline_passed(request.deadline_at, now)
        needed_s = self._seconds_to_first_token(request, num_waiting, has_free_slot, now)
        if now + needed_s > request.deadline_at:
            return deadline_infeasible(request.deadline_at - now, needed_s)
        return None

    def _seconds_to_first_token(self, request: Request, num_waiting: int, has_free_slot: bool, now: float) -> float:
        """At least so many: departures that must come first, at the pace of late, and chunks in the fastest steps seen.

        Only first come, first served, it is known that all who wait are served before.
        """
        config = self._config
        wait_s = 0.0
        if not has_free_slot and not config.priority_preemption and self._departures.is_settled:
            in_turn = config.policy == "fcfs" and not config.arrivals_claim_slots
            wait_s = self._departures.seconds_until(num_waiting + 1 if in_turn else 1, 0, now)
        chunk = min(config.prefill_chunk, config.max_num_batched_tokens)
        num_chunks = 1 if config.enable_prefix_caching else -(-request.num_prompt_tokens // chunk)
        return wait_s + num_chunks * self._step_time.fastest_s


def never_fits(config: SchedulerConfig, request: Request, num_pages: int) -> Rejection | None:
    """A request too long for the context or, needing `num_pages`, for the whole pool; None when it may run."""
    prompt, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
    if prompt > config.max_model_len:
        message = f"prompt has {prompt} tokens; the limit is {config.max_model_len} (max_model_len)"
    elif total > config.max_model_len:
        message = (
            f"prompt has {prompt} tokens and max_tokens is {request.max_tokens}, together {total};"
            f" the limit is {config.max_model_len} (max_model_len)"
        )
    elif num_pages > config.num_pages - 1:
        message = (
            f"prompt and max_tokens are {total} tokens and need {num_pages} KV pages of {config.page_size};"
            f" the pool has {config.num_pages - 1} (num_pages); shorten the prompt or lower max_tokens"
        )
    else:
        return None
    return Rejection("never_fits", message)


def duplicate_id(request: Request) -> Rejection:
    """Its id belongs to a live request."""
    return Rejection("duplicate_id", f"request id {request.request_id!r} is live; use another one")


def deadline_passed(deadline_at: float, now: float) -> Rejection:
    """Too late on arrival."""
    return Rejection("deadline", f"the deadline passed {now - deadline_at:.3g} s before the request arrived")


def deadline_infeasible(left_s: float, needed_s: float) -> Rejection:
    """It could not have a first token in time."""
    message = f"the deadline is {left_s:.3f} s away and a first token takes about {needed_s:.3f} s at the present load"
    return Rejection("deadline_infeasible", message + "; try again later", needed_s)


def unknown_class(request: Request, known: Iterable[str]) -> Rejection:
    """It names a service class that is not configured."""
    names = ", ".join(name for name in known if name) or "none is configured"
    return Rejection("unknown_class", f"service class {request.service_class!r} is not one of: {names}")


def queue_full(
    config: SchedulerConfig, waiting: WaitingQueue, sequences: Items[Sequence], reason: str, retry_after_s: float
) -> Rejection:
    """The bound that `WaitingQueue.refusal_of_all` named is reached, or would be by all of `sequences`."""
    if reason.startswith("queue_full_class"):
        full = f"the queue of service class {sequences[0].request.service_class} is full"
    elif reason == "queue_full_requests":
        more = f" and {len(sequences)} come together" if len(sequences) > 1 else ""
        full = f"{len(waiting)} requests wait{more}; the limit is {config.max_queue_requests} (max_queue_requests)"
    else:
        full = (
            f"{waiting.num_tokens} tokens wait and this request adds"
            f" {sum(sequence.max_total_tokens for sequence in sequences)};"
            f" the limit is {config.max_queue_tokens} (max_queue_tokens)"
        )
    return Rejection(reason, full + "; try again later", retry_after_s)
