"""Whole runs: slots stay full, nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve.core import Request
from tests.scheduler.harness import Harness, make_config, make_request

NUM_SLOTS = 8


def slot_utilisation(records: list[dict[str, Any]], num_slots: int) -> float:
    """Share of slot-iterations that computed something, from a trace."""
    used = sum(len(record["decode"]) + len(record["prefill"]) for record in records)
    return used / (num_slots * len(records))


def static_utilisation(outputs: list[int], num_slots: int) -> float:
    """Of static batching: a batch of `num_slots` runs until its longest output ends."""
    batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
    return sum(outputs) / (num_slots * sum(max(batch) for batch in batches))


def run(requests: list[Request], lag: int = 0) -> Harness:
    """All at once through NUM_SLOTS slots."""
    config = make_config(
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=64,
        prefill_chunk=16,
        page_size=16,
        max_model_len=1024,
        num_pages=513,
        max_queue_requests=len(requests),
    )
    harness = Harness(config, lag)
    assert harness.add(*requests) == [None] * len(requests)
    harness.run()
    return harness


@pytest.mark.parametrize("lag", [0, 1])
def test_one_long_request_does_not_empty_the_other_slots(lag: int) -> None:
    # The textbook's batch: one of 900 tokens with seven of 40. Static batching keeps it for 900 iterations.
    batch = [900] + 7 * [40]
    assert static_utilisation(batch, NUM_SLOTS) == pytest.approx(0.164, abs=5e-4)

    # The same batch in front of a backlog of 40s that lasts as long as the long one.
    backlog = 7 * 22 * [40]
    requests = [make_request(f"r{i}", 1, output) for i, output in enumerate(batch + backlog)]
    harness = run(requests, lag)
    records = harness.records
    until_backlog_ends = [record for record in records if record["queue"]]
    assert len(until_backlog_ends) > 800
    assert slot_utilisation(until_backlog_ends, NUM_SLOTS) > 0.999
    assert slot_utilisation(records, NUM_SLOTS) > 0.95
    assert len(records) < 1000  # static batching: 900 and twenty times 40
    assert set(harness.ends.values()) == {"length"}


@pytest.mark.parametrize("lag", [0, 1])
def test_sixty_four_mixed_requests_leave_no_page_behind(lag: int) -> None:
    draw = random.Random(2)
    requests = [make_request(f"r{i}", draw.randint(1, 200), draw.randint(1, 120)) for i in range(64)]
    harness = run(requests, lag)
    scheduler = harness.scheduler
    assert {name: len(tokens) for name, tokens in harness.outputs.items()} == {
        request.request_id: request.max_tokens for request in requests
    }
    assert (scheduler.pages_owned, scheduler.pages_cached, scheduler.pages_free) == (0, 0, 512)
    assert scheduler.num_free_slots == NUM_SLOTS and scheduler.idle
    busy = [record for record in harness.records if record["queue"]]
    assert all(len(record["active"]) >= NUM_SLOTS - 2 for record in busy)


def test_more_memory_asked_for_than_there_is_slows_but_never_stalls() -> None:
    # Twenty requests that need 80 % of the pool each: one after the other, no iteration without work.
    harness = Harness(make_config(num_pages=17, max_queue_requests=20))
    harness.add(*(make_request(f"r{i}", 30, 20) for i in range(20)))
    harness.run()
    assert set(harness.ends.values()) == {"length"} and len(harness.ends) == 20
    assert all(plan.num_tokens for plan in harness.plans)
    assert max(len(record["active"]) for record in harness.records) == 1
