"""Traces to replay and diagnose: random runs of the scheduler's harness, written to files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Priority, Request, SamplingParams
from jaxserve.scheduler import TraceWriter
from tests.scheduler.harness import STOP_ID, Harness, make_request
from tests.scheduler.test_random_runs import draw_config, with_swaps


def write_trace(path: Path, config: SchedulerConfig, records: Iterable[Mapping[str, Any]]) -> Path:
    """A trace file of `records`, for the model "tiny"."""
    writer = TraceWriter(path, model="tiny", config=config)
    for record in records:
        writer(record)
    writer.close()
    return path


def sample(request_id: str, position: int) -> int:
    """Some token; STOP_ID at about every ninth position, differently per request."""
    return STOP_ID if (position * 2654435761 + int(request_id[1:]) * 40503) % 1000 % 9 == 0 else position


def random_config(draw: random.Random) -> SchedulerConfig:
    """Any policies under tight limits, so that queueing, refusal and preemption are common."""
    return replace(
        draw_config(draw),
        max_num_seqs=draw.randint(1, 4),
        max_num_batched_tokens=draw.randint(4, 12),
        num_pages=draw.randint(12, 40),
        max_queue_requests=draw.randint(0, 6),
        max_queue_tokens=draw.choice([30, 90, 1000]),
        priority_preemption=draw.random() < 0.7,
    )


LACKING_PAGES: dict[str, Any] = {
    "reservation": "optimistic",
    "preemption": "recompute",
    "num_host_pages": 0,
    "batching": "continuous",
    "page_size": 1,
    "num_pages": 36,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "max_queue_requests": 6,
    "max_queue_tokens": 1000,
    "itl_target_s": None,
}
"""Settings of runs in which, with steps in flight, all that hold a slot often lack a page."""


def events_of(harness: Harness, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a run's records."""
    return [event for record in harness.records for event in record["events"] if event["kind"] == kind]


def random_run(
    seed: int, lag: int, moves: int = 60, *, swaps: bool = True, transfers: bool = False, **changes: Any
) -> Harness:
    """A run with aborts, stop strings, stop ids, deadlines, refusals, reused ids, jumps of time and flushes.

    `swaps`: half of the runs swap. `transfers`: some requests come with pages, or have theirs copied out. `changes`:
    settings that are not left to chance.
    """
    draw = random.Random(seed)
    config = with_swaps(random_config(draw), seed) if swaps else random_config(draw)
    harness = Harness(replace(config, **changes), lag, sample)
    apart = random.Random(seed)  # so that runs without transfers stay what they were

    def request(request_id: str, priority: int) -> Request:
        deadline_at = harness.now + draw.choice([-1.0, 0.5, 3.0, 7.25]) if draw.random() < 0.4 else None
        prompt_logprobs = draw.choice([None, None, None, 0])
        params = SamplingParams(max_tokens=8, min_tokens=draw.choice([0, 0, 3]), prompt_logprobs=prompt_logprobs)
        prompt = draw.randint(1, 30)
        pages: dict[str, Any] = {}
        if transfers:
            size = harness.config.page_size
            imported = 0 if prompt_logprobs is not None else min(apart.randint(0, 5), (prompt - 1) // size)
            pages = {"num_imported_tokens": imported * size, "exports_kv": apart.random() < 0.3}
        return make_request(
            request_id,
            prompt,
            draw.choice([0, 1, 2, 5, 9, 40]),
            params=params,
            eos_token_ids=(STOP_ID,),
            priority=priority,
            deadline_at=deadline_at,
            tenant=draw.choice(["", "t1"]),
            cache_salt=draw.choice(["", "", "salt"]),
            service_class="bulk" if harness.config.service_classes and draw.random() < 0.3 else "",
            **pages,
        )

    def draw_priority() -> int:
        return draw.choice([Priority.HIGH, Priority.NORMAL, Priority.LOW])

    def add() -> None:
        harness.add(request(f"r{draw.randrange(40)}", draw_priority()))

    def add_all() -> None:
        priority = draw_priority()
        harness.add_all([request(f"r{draw.randrange(40)}", priority) for _ in range(draw.randint(2, 4))])

    def abort() -> None:
        live = harness.scheduler.live_ids
        if live:
            harness.abort(
                draw.choice(live),
                reason=draw.choice(
                    [FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR, FinishReason.UNFOLLOWABLE]
                ),
            )

    def jump() -> None:
        harness.now += draw.choice([0.1, 2.0, 20.0])

    def reset() -> None:
        harness.scheduler.reset_prefix_cache(harness.now)

    scheduler = harness.scheduler
    possible: list[Callable[[], Any]] = [add, add_all, abort, jump, harness.step, harness.plan]
    possible += [scheduler.flush_trace, reset]
    for move in draw.choices(possible, [14, 2, 4, 2, 16, 4, 2, 1], k=moves):
        move()
    if draw.random() < 0.7:
        harness.run()
    harness.scheduler.flush_trace()
    return harness
