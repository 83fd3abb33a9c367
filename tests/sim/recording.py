"""Traces to replay and diagnose: random runs of the scheduler's harness, written to files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Priority, SamplingParams
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


def random_run(seed: int, lag: int, moves: int = 60, *, sharing: bool = False, swaps: bool = True) -> Harness:
    """A run with aborts, stop strings, stop ids, deadlines, refusals, reused ids, jumps of time and flushes.

    `sharing`: with a prefix cache, which other runs have at random. `swaps`: half of the runs swap.
    """
    draw = random.Random(seed)
    config = with_swaps(random_config(draw), seed) if swaps else random_config(draw)
    harness = Harness(replace(config, enable_prefix_caching=True) if sharing else config, lag, sample)

    def add() -> None:
        deadline_at = harness.now + draw.choice([-1.0, 0.5, 3.0, 7.25]) if draw.random() < 0.4 else None
        prompt_logprobs = draw.choice([None, None, None, 0])
        params = SamplingParams(max_tokens=8, min_tokens=draw.choice([0, 0, 3]), prompt_logprobs=prompt_logprobs)
        harness.add(
            make_request(
                f"r{draw.randrange(40)}",
                draw.randint(1, 30),
                draw.choice([0, 1, 2, 5, 9, 40]),
                params=params,
                eos_token_ids=(STOP_ID,),
                priority=draw.choice([Priority.HIGH, Priority.NORMAL, Priority.LOW]),
                deadline_at=deadline_at,
                tenant=draw.choice(["", "t1"]),
                cache_salt=draw.choice(["", "", "salt"]),
                service_class="bulk" if harness.config.service_classes and draw.random() < 0.3 else "",
            )
        )

    def abort() -> None:
        live = harness.scheduler.live_ids
        if live:
            harness.abort(draw.choice(live), reason=draw.choice([FinishReason.ABORT, FinishReason.STOP, "error"]))

    def jump() -> None:
        harness.now += draw.choice([0.1, 2.0, 20.0])

    def reset() -> None:
        harness.scheduler.reset_prefix_cache(harness.now)

    possible: list[Callable[[], Any]] = [add, abort, jump, harness.step, harness.scheduler.flush_trace, reset]
    for move in draw.choices(possible, [16, 4, 2, 16, 2, 1], k=moves):
        move()
    if draw.random() < 0.7:
        harness.run()
    harness.scheduler.flush_trace()
    return harness
