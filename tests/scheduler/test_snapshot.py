"""Snapshots: replays that begin in the middle of runs of every policy, with steps in flight, decide the same."""

import json
import random
from collections import Counter
from dataclasses import asdict

import pytest

from jaxserve.core import Request
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.snapshot import restore_snapshot, take_snapshot
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_ring import TraceRing
from jaxserve.sim.replayer import replay
from tests.scheduler.harness import Harness, make_config, make_request
from tests.scheduler.test_random_runs import CHANGES, draw_config, draw_request, sample, with_steps, with_swaps


def dumped(path, ring, config):
    """A reader of what a ring holds, written as a crash dump is."""
    header = {"kind": "header", "schema_version": 5, "model": "", "config": asdict(config)}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *ring.lines)))
    return TraceReader(path)


def run(seed, layers, segment):
    """A random run, and the ring that recorded it."""
    rng = random.Random(seed)
    config = CHANGES[layers](with_steps(with_swaps(draw_config(rng), seed), seed), seed)
    harness = Harness(config, rng.randint(0, 3), sample)
    ring = TraceRing(segment)
    harness.scheduler._trace._sink = ring
    if harness.config.max_decode_steps > 1:
        harness.measure()
    for moment in range(70):
        if rng.random() < 0.6:
            request = draw_request(rng, f"r{moment % 50}", harness)
            if request.request_id not in harness.scheduler.live_ids:
                harness.add(request)
        if harness.scheduler.live_ids and rng.random() < 0.05:
            harness.abort(rng.choice(harness.scheduler.live_ids))
        harness.step()
        ring.after_update(harness.scheduler)
    harness.scheduler.flush_trace()
    return harness, ring


@pytest.mark.parametrize("layers", list(CHANGES))
def test_a_ring_replays_from_its_snapshot(tmp_path, layers):
    seen = Counter()
    for seed in range(12):
        harness, ring = run(seed, layers, segment=random.Random(seed).randint(8, 30))
        reader = dumped(tmp_path / "dump.jsonl", ring, harness.config)
        report = replay(reader)
        assert report.difference is None, f"seed {seed}: {report.difference}"
        snapshot = reader.header.snapshot
        if snapshot is not None:
            seen["snapshots"] += 1
            seen["live"] += bool(snapshot["live"])
            seen["pages"] += bool(snapshot["pages"])
            seen["iterations"] += report.num_iterations
    assert seen["snapshots"] >= 10 and seen["live"] >= 8 and seen["pages"] >= 2 and seen["iterations"] > 100, seen


def test_a_snapshot_that_was_changed_shows_as_a_difference(tmp_path):
    harness, ring = run(3, "full", 12)
    ring.lines[0]["state"]["fields"]["_num_plans"] += 1
    difference = replay(dumped(tmp_path / "dump.jsonl", ring, harness.config)).difference
    assert difference is not None and difference.key in ("plan", "iteration", "events[0].step[0]")


def test_no_token_is_in_a_snapshot():
    scheduler = Scheduler(make_config(enable_prefix_caching=True), trace=lambda record: None)
    tokens = tuple(range(770_001, 770_021))
    scheduler.add(Request("a", tokens, max_tokens=4), 0.0)
    scheduler.schedule(0.0)
    assert "7700" not in json.dumps(take_snapshot(scheduler), allow_nan=False)


def test_a_snapshot_of_another_version_is_refused():
    scheduler = Scheduler(make_config(), trace=lambda record: None)
    scheduler.add(make_request("a"), 0.0)
    text = json.dumps(take_snapshot(scheduler)).replace("Holding", "Gone")
    fresh = Scheduler(make_config(), trace=lambda record: None)
    with pytest.raises(ValueError, match="does not fit"):
        restore_snapshot(fresh, json.loads(text), None)
