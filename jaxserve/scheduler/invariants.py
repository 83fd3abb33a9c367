"""The scheduler's invariants, as assertions over its whole state. See the essay in `scheduler.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.holding import Holding
from jaxserve.scheduler.sequence import NO_SLOT, Sequence

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
    # Whom a running request's need of pages, or a failed step, sent back may stand beyond the bounds: it was admitted
    # within them.
    sent_back = [each for each in queue if each.num_recoveries]
    fresh = [
        each for each in queue if not (each.num_recoveries or (each.num_preemptions and scheduler._reservation.grows))
    ]
    assert len(fresh) <= config.max_queue_requests, f"{len(fresh)} requests wait"
    assert sum(s.max_total_tokens for s in fresh) <= config.max_queue_tokens, f"{queue.num_tokens} tokens wait"
    others = len(queue) - len(sent_back)
    assert others <= config.max_queue_requests + config.max_num_seqs, f"{others} requests wait in all"
    most = config.max_num_seqs * (config.max_steps_ahead + 3) + config.max_queue_requests
    assert len(queue) <= most, f"{len(queue)} requests wait in all"
    assert len(queue) == sum(1 for _ in queue), f"the queue counts {len(queue)} requests"
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
            assert not (sequence.num_held_pages or sequence.num_promised_pages), f"{request_id} waits with pages"
    for slot, sequence in scheduler._running.items():
        assert sequence.slot == slot, f"{sequence.request_id} is at slot {slot} and says {sequence.slot}"
        assert scheduler._live.get(sequence.request_id) is sequence, f"{sequence.request_id} runs but is not live"
        assert not sequence.fully_scheduled, f"{sequence.request_id} holds a slot it does not need"
    for name, count in scheduler._num_slots_held.items():
        ids = [each.request_id for each in scheduler._running.values() if each.request.service_class == name]
        assert count == len(ids), f"service class {name} counts {count} slots, {ids} hold one"
    decoding = [sequence for sequence in scheduler._running.values() if sequence.decode_ready]
    assert decoding == scheduler._decoding.sequences, f"{_ids(decoding)} decode, listed otherwise"
    prompts = [sequence for sequence in scheduler._running.values() if not sequence.decode_ready]
    assert prompts == list(scheduler._prefilling.values()), f"{_ids(prompts)} have prompts left, listed otherwise"
    deadlines = (sequence for _, sequence in scheduler._deadlines.entries())
    for sequence in (*scheduler._waiting, *deadlines):
        assert scheduler._live.get(sequence.request_id) is sequence, f"{sequence.request_id} ended but is listed"


def _check_pages(scheduler: SchedulerState) -> None:
    holders = {sequence.arrival: sequence for sequence in scheduler._live.values()}
    for flight in scheduler._in_flight:
        holders |= {sequence.arrival: sequence for sequence in (*flight.decode, *flight.prefill)}
    _check_held(scheduler, holders)
    pages = scheduler._pages
    holders_of: dict[int, list[str]] = {}
    group_of: dict[int, int] = {}
    for sequence in holders.values():
        for holding in sequence.holdings:
            for page in holding.pages:
                holders_of.setdefault(page, []).append(sequence.request_id)
                group = group_of.setdefault(page, holding.group)
                assert group == holding.group, f"page {page} is of groups {group} and {holding.group}"
    for page, ids in holders_of.items():
        assert page != 0, f"{ids} hold the null page"
        assert pages.num_owners(page) == len(ids), f"page {page} counts {pages.num_owners(page)} owners, has {ids}"
        assert len(ids) == 1 or scheduler.config.enable_prefix_caching, f"page {page} belongs to {ids}"
        assert not pages.cache.is_idle(page), f"page {page} of {ids} counts as let go"
    if any(scheduler.config.windows):
        holdings = [holding for sequence in holders.values() for holding in sequence.holdings]
        of_giving = [page for holding in holdings if holding.gives_back for page in holding.pages]
        others = {page for holding in holdings if not holding.gives_back for page in holding.pages}
        extra = len(of_giving) + len(others) - len(others.union(of_giving))
        assert pages.num_extra == extra, f"shared pages count {pages.num_extra} times more than once, not {extra}"
    assert len(holders_of) == scheduler.pages_owned, f"{scheduler.pages_owned} pages owned, {len(holders_of)} are held"
    on_host = [page for sequence in holders.values() for each in sequence.holdings for page in each.host_pages]
    assert len(set(on_host)) == len(on_host), f"host pages {sorted(on_host)} have two owners"
    accounted = scheduler.host_pages_free + len(on_host)
    assert accounted == scheduler.config.num_host_pages, f"{accounted} host pages are accounted for"
    promised = sum(sequence.num_promised_pages for sequence in holders.values())
    assert promised == scheduler._reservation.num_promised, f"{promised} pages are promised, counted otherwise"
    if scheduler.config.reservation != "exact":  # there only the worst moment has to fit
        assert promised <= pages.num_promisable, f"{promised} pages are promised, {pages.num_promisable} may be"


def _check_held(scheduler: SchedulerState, holders: dict[int, Sequence]) -> None:
    """Each group has the pages of the tokens that are seen, and no more."""
    config = scheduler.config
    for sequence in holders.values():
        assert [each.window for each in sequence.holdings] == list(config.windows), f"{sequence.request_id}: groups"
        counts = {each.num_pages for each in sequence.holdings if not _lacks_pages(sequence)}
        assert len(counts) <= 1, f"{sequence.request_id} has had {counts} pages, not as many in every group"
        for holding in sequence.holdings:
            where = f"{sequence.request_id}, group {holding.group}"
            needed = -(-sequence.num_scheduled // config.page_size) - holding.num_passed
            if sequence.is_swapped_out:
                assert not holding.pages and sequence in scheduler._waiting, f"{where} is not swapped out"
                assert len(holding.host_pages) == needed, f"{where}: {holding.host_pages} of {needed}"
            elif sequence.num_to_import:
                assert sequence in scheduler._waiting or sequence.slot in scheduler._unplaced, f"{where}: not imported"
                assert len(holding.pages) <= needed, f"{where} has {len(holding.pages)} pages, not {needed} at most"
            elif not sequence.restarted and (sequence.finish_reason is None or holding.pages):
                assert len(holding.pages) == needed, f"{where} has {len(holding.pages)} pages, not {needed}"
            _check_passed(config, sequence, holding)
            assert holding.num_promised >= 0, f"{where} is owed {holding.num_promised} pages"


def _check_passed(config: SchedulerConfig, sequence: Sequence, holding: Holding) -> None:
    """Pages given back are those that no row to come sees; those left are few."""
    where = f"{sequence.request_id}, group {holding.group}"
    if not holding.window:
        assert not holding.num_passed and not holding.gives_back, f"{where} gave pages back"
        return
    held = max(len(holding.pages), len(holding.host_pages))
    count = max(min(config.prefill_chunk, config.max_num_batched_tokens), config.max_decode_steps)
    assert held <= config.pages_spanned(count, holding.window), f"{where} holds {held} pages at once"
    if not sequence.restarted:
        unseen, passed = max(sequence.num_scheduled + 1 - holding.window, 0), holding.num_passed
        assert passed * config.page_size <= unseen, f"{where} gave {passed} pages of {unseen} tokens back"


def _lacks_pages(sequence: Sequence) -> bool:
    """Some of its pages are elsewhere, which need not be as many in every group."""
    return sequence.is_swapped_out or sequence.num_to_import > 0


def _ids(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]
