"""The Chrome trace export: valid, in order on every track, and the same for the same trace."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core import Priority
from jaxserve.replay import main
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.iteration_cost import IterationCost
from jaxserve.sim.perfetto import PerfettoWriter
from jaxserve.sim.replayer import replay
from tests.scheduler.harness import Harness, make_config, make_request
from tests.sim.clocked import Arrival, run
from tests.sim.recording import random_run, write_trace
from tests.sim.trace_event_format import violations


def export(path: Path) -> list[dict[str, Any]]:
    """The export's events, checked against the format."""
    reader = TraceReader(path)
    file = io.StringIO()
    writer = PerfettoWriter(file, reader.header)
    assert replay(reader, observe=writer).difference is None
    writer.close()
    document = json.loads(file.getvalue())
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert violations(document) == []
    times = [event[key] for event in document["traceEvents"] for key in ("ts", "dur") if key in event]
    assert all(isinstance(time, int) for time in times)
    return list(document["traceEvents"])


def trace_of(harness: Harness, path: Path) -> Path:
    return write_trace(path, harness.config, harness.records)


def names(events: list[dict[str, Any]], **fields: Any) -> list[tuple[Any, ...]]:
    """(name, ts, dur) of the spans, or (name, ts, args) of what else matches `fields`."""
    chosen = [event for event in events if all(event.get(key) == value for key, value in fields.items())]
    return [(event["name"], event["ts"], event.get("dur", event["args"])) for event in chosen]


def test_a_slots_track_shows_prefill_then_decode_of_each_holder(tmp_path: Path) -> None:
    """One slot, a second an iteration: a's prompt takes two, then it decodes twice; b follows."""
    arrivals = [Arrival(100.0, make_request("a", 12, 3)), Arrival(100.0, make_request("b", 4, 1))]
    events = export(run(arrivals, tmp_path / "t", make_config(max_num_seqs=1), cost=IterationCost(1.0, 0.0, 0.0)))
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {0: "engine", 1: "slot 0"}
    second = 10**6
    assert names(events, ph="X", tid=1) == [
        ("prefill a", 0, 2 * second),
        ("decode a", 2 * second, 2 * second),
        ("prefill b", 4 * second, second),
    ]
    assert names(events, ph="X", tid=0) == [("step", number * second, second) for number in range(5)]
    args = [event["args"] for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert args[:2] == [
        {"request": "a", "tokens": 12, "steps": 2},
        {"request": "a", "tokens": 2, "steps": 2},
    ]


def test_a_span_of_several_steps_says_how_many_and_counts_their_tokens(tmp_path: Path) -> None:
    harness = Harness(make_config(max_decode_steps=4, max_arrival_delay_s=1e6), lag=1)
    harness.add(make_request("a", 4, 40))
    harness.run()
    several = sum(plan.num_steps == 4 for plan in harness.plans)
    assert several
    events = export(trace_of(harness, tmp_path / "t"))
    steps = [event["args"].get("decode_steps", 1) for event in events if event["name"] == "step"]
    assert steps == [plan.num_steps for plan in harness.plans]
    (decode,) = [event["args"] for event in events if event["name"] == "decode a"]
    assert decode == {"request": "a", "tokens": 39, "steps": len(harness.plans) - 1}
    tokens = [event["args"]["decode"] for event in events if event["ph"] == "C" and event["name"] == "tokens"]
    assert tokens == [0, *(plan.num_steps for plan in harness.plans[1:])]


def test_counters_follow_queue_pages_and_tokens(tmp_path: Path) -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.add(make_request("a", 12, 2), make_request("b", 4, 1))
    harness.run()
    events = export(trace_of(harness, tmp_path / "t"))
    tokens = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "tokens"]
    assert tokens == [{"decode": 0, "prefill": n} for n in (8, 4)] + [
        {"decode": 1, "prefill": 0},
        {"decode": 0, "prefill": 4},
    ]
    queue = [event["args"]["requests"] for event in events if event["ph"] == "C" and event["name"] == "queue"]
    assert queue == [1, 1, 1, 0]
    pages = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "pages"]
    assert pages == [{"owned": owned, "cached": 0, "free": 256 - owned} for owned in (2, 3, 0, 0)]


def test_what_goes_wrong_is_an_instant(tmp_path: Path) -> None:
    config = make_config(max_num_seqs=1, max_queue_requests=2, priority_preemption=True)
    harness = Harness(config)
    harness.add(make_request("low", 4, 30, priority=Priority.LOW))
    harness.step()
    harness.add(make_request("high", 4, 2, priority=Priority.HIGH), make_request("late", deadline_at=1.5))
    harness.add(make_request("refused"))
    for _ in range(3):
        harness.step()
    harness.abort("low")
    harness.scheduler.flush_trace()
    events = export(trace_of(harness, tmp_path / "t"))
    second = 10**6
    assert sorted(names(events, ph="i"), key=lambda event: event[:2]) == [
        ("aborted", 4 * second, {"request": "low", "reason": "abort"}),
        ("expired", 2 * second, {"request": "late"}),
        ("preempted", 1 * second, {"request": "low"}),
        ("rejected", 1 * second, {"request": "refused", "reason": "queue_full_requests"}),
    ]
    phases = [name for name, *_ in names(events, ph="X", tid=1)]
    assert phases == ["prefill low", "prefill high", "decode high", "decode low"]


@pytest.mark.parametrize("seed", range(12))
def test_spans_of_a_slot_do_not_overlap_whatever_is_in_flight(tmp_path: Path, seed: int) -> None:
    harness = random_run(seed, lag=seed % 4)
    events = export(trace_of(harness, tmp_path / "t"))
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    for spans in tracks.values():
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"], (before, after)
    slots = [event for track, spans in tracks.items() if track for event in spans]
    planned = sum(len(r["decode"]) + sum(n for _, n in r["prefill"]) for r in harness.records if "kind" not in r)
    assert sum(event["args"]["tokens"] for event in slots) == planned
    assert len(tracks[0]) == sum("kind" not in record for record in harness.records)


def test_the_command_writes_the_same_file_each_time(tmp_path: Path) -> None:
    trace = trace_of(random_run(5, lag=1), tmp_path / "t")
    for name in ("one.json", "two.json"):
        assert main(["prog", f"--trace={trace}", f"--perfetto={tmp_path / name}"]) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert json.loads((tmp_path / "one.json").read_text())["traceEvents"]
