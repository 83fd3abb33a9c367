"""The scheduler's invariants, as assertions over its whole state. See the essay in `scheduler.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.scheduler.sequence import NO_SLOT

if TYPE_CHECKING:
    from jaxserve.scheduler.state import SchedulerState


def check(scheduler: SchedulerState) -> None:
    """Raises AssertionError naming what is wrong and with whom."""
    _check_conservation(scheduler)
    _check_queue(scheduler)
    _check_states(scheduler)
    _check_pages(scheduler)


def _check_conservation(scheduler: SchedulerState) -> None:
    counters, live = scheduler.counters, len(scheduler._live)
    assert counters.offered == counters.num_ended + live, f"{counters} and {live} live do not add up"
    config = scheduler.config
    total = scheduler.pages_free + scheduler.pages_cached + scheduler.pages_owned
    assert total == config.num_pages - 1, f"{total} pages are accounted for, {config.num_pages - 1} exist"
    held = config.max_num_seqs - scheduler.num_free_slots
    assert held == len(scheduler._running), f"{held} slots are held, {len(scheduler._running)} requests run"


def _check_queue(scheduler: SchedulerState) -> None:
    config, queue = scheduler.config, scheduler._waiting
    assert len(queue) <= config.max_queue_requests, f"{len(queue)} requests wait"
    assert queue.num_tokens <= config.max_queue_tokens, f"{queue.num_tokens} tokens wait"
    tokens = sum(sequence.max_total_tokens for sequence in queue)
    assert tokens == queue.num_tokens, f"the queue counts {queue.num_tokens} tokens and holds {tokens}"


def _check_states(scheduler: SchedulerState) -> None:
    for request_id, sequence in scheduler._live.items():
        waiting = sequence in scheduler._waiting
        running = sequence.slot != NO_SLOT
        landing = not waiting and sequence.fully_scheduled and sequence.num_in_flight > 0
        assert waiting + running + landing == 1, f"{request_id}: waiting {waiting}, {running=}, {landing=}"
        assert sequence.finish_reason is None, f"{request_id} is live and {sequence.finish_reason}"
        assert sequence.num_scheduled <= sequence.num_kv_tokens, f"{request_id} is scheduled beyond its end"
        assert len(sequence.output_token_ids) <= sequence.request.max_tokens, f"{request_id} has too many tokens"
        has_deadline = sequence.request.deadline_at is not None
        assert (sequence in scheduler._deadlines) == has_deadline, f"{request_id}: deadline is not watched"
        if waiting and not sequence.num_preemptions:
            assert not sequence.pages and not sequence.num_reserved_pages, f"{request_id} waits with pages"
    for slot, sequence in scheduler._running.items():
        assert sequence.slot == slot, f"{sequence.request_id} is at slot {slot} and says {sequence.slot}"
        assert scheduler._live.get(sequence.request_id) is sequence, f"{sequence.request_id} runs but is not live"
        assert not sequence.fully_scheduled, f"{sequence.request_id} holds a slot it does not need"
    for sequence in (*scheduler._waiting, *scheduler._deadlines):
        assert scheduler._live.get(sequence.request_id) is sequence, f"{sequence.request_id} ended but is listed"


def _check_pages(scheduler: SchedulerState) -> None:
    holders = {sequence.arrival: sequence for sequence in scheduler._live.values()}
    for flight in scheduler._in_flight:
        holders |= {sequence.arrival: sequence for sequence in (*flight.decode, *flight.prefill)}
    owner: dict[int, str] = {}
    for sequence in holders.values():
        for page in sequence.pages:
            assert page not in owner, f"page {page} belongs to {owner[page]} and {sequence.request_id}"
            assert page != 0 and not scheduler._pages.is_free(page), f"page {page} of {sequence.request_id} is free"
            owner[page] = sequence.request_id
        needed = -(-sequence.num_scheduled // scheduler.config.page_size)
        assert len(sequence.pages) == needed, f"{sequence.request_id} has {len(sequence.pages)} pages, needs {needed}"
        assert len(sequence.pages) <= sequence.num_reserved_pages, f"{sequence.request_id} has pages not set aside"
    assert len(owner) == scheduler.pages_owned, f"{scheduler.pages_owned} pages are owned, {len(owner)} are held"
    reserved = sum(sequence.num_reserved_pages for sequence in holders.values())
    assert reserved == scheduler._reservation.num_reserved, f"{reserved} pages are set aside, counted otherwise"
    assert reserved <= scheduler.config.num_pages - 1, f"{reserved} pages are set aside, more than exist"
