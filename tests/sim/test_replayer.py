"""Replay: what was recorded is decided again, to the byte; what was tampered with is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.core import FinishReason, Request
from jaxserve.scheduler import Scheduler, StepResult, TraceWriter
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.trace import MAX_EVENTS
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.replayer import ABSENT, Difference, ReplayReport, replay
from tests.scheduler.harness import Harness, make_config, make_request, stopping_request
from tests.sim.recording import LACKING_PAGES, events_of, random_run, write_trace


def replayed_bytes(path: Path) -> tuple[ReplayReport, bytes]:
    """The report of replaying `path`, and the file that the replay writes."""
    reader = TraceReader(path)
    output = path.with_suffix(".replayed")
    writer = TraceWriter(output, model=reader.header.model, config=reader.header.config)
    report = replay(reader, sink=writer)
    writer.close()
    return report, output.read_bytes()


def assert_replays(path: Path) -> ReplayReport:
    report, written = replayed_bytes(path)
    assert report.difference is None, str(report.difference)
    assert written == path.read_bytes()
    return report


def tampered(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Difference:
    """The difference found after `change` was made to the file's objects, the header first."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = replay(TraceReader(path)).difference
    assert difference is not None
    return difference


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), lag=st.integers(0, 3))
@example(seed=0, lag=0)
def test_any_run_replays_to_the_byte(tmp_path_factory: pytest.TempPathFactory, seed: int, lag: int) -> None:
    harness = random_run(seed, lag)
    path = write_trace(tmp_path_factory.mktemp("run") / "trace.jsonl", harness.config, harness.records)
    report = assert_replays(path)
    iterations = [record for record in harness.records if "kind" not in record]
    assert report.num_iterations == len(iterations)
    assert report.num_requests == harness.scheduler.counters.offered


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), lag=st.integers(0, 2))
@example(seed=0, lag=0)
def test_any_run_with_pages_from_elsewhere_replays_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lag: int
) -> None:
    harness = random_run(seed, lag, transfers=True)
    if (seed, lag) == (0, 0):  # the runs have what they are for
        assert any(plan.imports for plan in harness.plans) and any(plan.exports for plan in harness.plans)
    assert_replays(write_trace(tmp_path_factory.mktemp("run") / "trace.jsonl", harness.config, harness.records))


@pytest.mark.parametrize("seed", [*range(0, 40), 42, 53, 168])
def test_page_numbers_that_were_forgotten_are_not_missed(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.scheduler.page_ordinals._SLACK", 2)
    harness = random_run(seed, seed % 4, enable_prefix_caching=True)
    assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), lag=st.integers(1, 2))
def test_any_run_that_lacks_pages_with_steps_in_flight_replays_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lag: int
) -> None:
    harness = random_run(seed, lag, 120, **LACKING_PAGES)
    assert_replays(write_trace(tmp_path_factory.mktemp("run") / "trace.jsonl", harness.config, harness.records))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_any_run_of_several_steps_replays_to_the_byte(
    tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimeModel, "MIN_STEPS", 1)
    num_several = 0
    for seed in range(60):
        harness = random_run(seed, lag, 120, max_decode_steps=1 + seed % 7, max_arrival_delay_s=(4.0, 1e6)[seed % 2])
        assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))
        num_several += sum(plan.num_steps > 1 for plan in harness.plans)
    assert num_several > (10 if lag == 0 else 20)  # without a lag time stands still, but for jumps: little is measured


def test_a_trace_of_the_schema_before_is_one_without_several_steps(tmp_path: Path) -> None:
    harness = random_run(3, 1)
    path = write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["schema_version"] = 3
    for name in ("max_decode_steps", "max_arrival_delay_s"):
        del lines[0]["config"][name]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(TraceReader(path))
    assert report.difference is None and report.num_iterations > 10


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_a_changed_number_of_tokens_is_a_difference(tmp_path: Path, change: int) -> None:
    harness = Harness(make_config(max_decode_steps=4, max_arrival_delay_s=1e6), lag=1)
    harness.add(make_request("a", 4, 40), make_request("b", 4, 40))
    harness.run()
    path = write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)

    def edit(lines: list[dict[str, Any]]) -> None:
        record = next(line for line in lines if line.get("decode_steps", 1) > 1)
        record["decode_tokens"][0] += change

    difference = tampered(path, edit)
    assert difference.key.startswith("decode_tokens"), difference


def test_calls_that_took_slots_and_gave_no_plan_are_repeated_at_their_instant(tmp_path: Path) -> None:
    num_calls = 0
    for seed in range(100):
        harness = random_run(seed, 1 + seed % 2, 120, **LACKING_PAGES)
        assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))
        num_calls += len(events_of(harness, "starve"))
    assert num_calls >= 10


def starving_pair(*others: Request) -> Harness:
    """Two requests fill the pool's four pages and reach their third page together, a step in flight.

    `others` come right after them and wait; an arrival comes between the call without a plan and its update.
    """
    config = make_config(reservation="optimistic", preemption="recompute", num_pages=5, max_num_seqs=2)
    harness = Harness(config, lag=1)
    harness.add(make_request("a", 3, 12), make_request("b", 3, 12), *others)
    while not events_of(harness, "starve"):
        harness.plan()
        harness.add(make_request(f"late{len(harness.plans)}", 3, 2))
        harness.now += 1.0
        harness.scheduler.flush_trace()
    return harness


def test_a_call_that_gave_no_plan_may_be_followed_by_an_arrival_and_begin_with_an_expiry(tmp_path: Path) -> None:
    (starved,) = events_of(starving_pair(), "starve")
    harness = starving_pair(make_request("waits", 3, 2, deadline_at=starved["now"]))
    assert [(event["id"], event["now"]) for event in events_of(harness, "expire")] == [("waits", starved["now"])]
    assert events_of(harness, "starve") == [starved]
    assert events_of(harness, "add")[-1]["step"] == starved["step"]
    harness.run()
    assert harness.scheduler.counters.preemptions
    assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))


def test_a_starved_call_left_out_of_a_trace_is_missed(tmp_path: Path) -> None:
    """The event is what tells of the call: without it the replay decides otherwise."""
    harness = next(run for seed in range(100) if events_of(run := random_run(seed, 1, 120, **LACKING_PAGES), "starve"))
    path = write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)

    def remove(lines: list[dict[str, Any]]) -> None:
        for line in lines[1:]:
            line["events"] = [event for event in line["events"] if event["kind"] != "starve"]

    assert tampered(path, remove).key.startswith(("preempted_next", "queue", "active", "events"))


def test_the_random_runs_hold_everything_that_can_happen() -> None:
    """Else the property above would say little."""
    counts: dict[str, int] = {}
    for seed in range(150):
        harness = random_run(seed, seed % 4)
        counters = harness.scheduler.counters
        outcomes = {"preemptions": counters.preemptions, **counters.rejected, **{r: 0 for r in FinishReason}}
        for reason in harness.ends.values():
            outcomes[reason] += 1
        outcomes["shared pages"] = counters.cached_tokens
        outcomes["recomputed"] = counters.recomputed_tokens
        outcomes["swapped"] = counters.swapped_pages
        together = [event for event in events_of(harness, "add") if "together" in event]
        outcomes["taken together"] = sum(event["outcome"] in ("slot", "queue") for event in together)
        outcomes["refused together"] = len(together) - outcomes["taken together"]
        outcomes["empty plan with an expiry"] = sum(
            event["kind"] == "expire" and event["now"] not in {record.get("now") for record in harness.records}
            for record in harness.records
            for event in record["events"]
        )
        for name, count in outcomes.items():
            counts[name] = counts.get(name, 0) + count
    wanted = {*FinishReason, "preemptions", "queue_full_requests", "queue_full_tokens", "never_fits", "deadline"}
    wanted |= {"duplicate_id", "empty plan with an expiry", "shared pages", "recomputed", "swapped"}
    wanted |= {"taken together", "refused together"}
    assert {name for name in wanted if counts.get(name, 0) >= 3} == wanted, counts


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests on one slot: one stops by an id, one expires, one is refused."""
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=1), lag=1)
    harness.add(make_request("a", 12, 5), make_request("b", 4, 9, deadline_at=3.5), make_request("c"))
    harness.run()
    return write_trace(tmp_path / "trace.jsonl", harness.config, harness.records)


def test_a_report_counts_what_was_equal(trace: Path) -> None:
    assert assert_replays(trace) == ReplayReport(6, 3, 6, None, None)


@pytest.mark.parametrize(
    ("line", "key", "value", "named"),
    [
        (1, "pages_owned", 77, "iteration 0 (line 2), pages_owned: recorded 77, replayed 3"),
        (3, "decode", ["b"], "iteration 2 (line 4), decode: recorded ['b'], replayed ['a']"),
        (2, "prefill", [["a", 3]], "iteration 1 (line 3), prefill: recorded [['a', 3]], replayed [['a', 4]]"),
        (6, "completed", [], "iteration 5 (line 7), completed: recorded [], replayed ['a']"),
        (2, "more", 1, f"iteration 1 (line 3), more: recorded 1, replayed {ABSENT!r}"),
    ],
)
def test_a_tampered_value_is_named(trace: Path, line: int, key: str, value: Any, named: str) -> None:
    difference = tampered(trace, lambda lines: lines[line].update({key: value}))
    assert str(difference) == named


def test_the_first_difference_is_the_one_named(trace: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[2]["queue"], lines[4]["queue"] = ["z"], ["y"]

    difference = tampered(trace, change)
    assert (difference.line, difference.iteration, difference.key) == (3, 1, "queue")


def test_a_tampered_outcome_is_named_with_its_place(trace: Path) -> None:
    difference = tampered(trace, lambda lines: lines[1]["events"][2].update(outcome="queue"))
    assert (difference.key, difference.recorded, difference.replayed) == (
        "events[2].outcome",
        "queue",
        "queue_full_requests",
    )


def test_a_removed_arrival_leaves_a_plan_that_nothing_asks_for(trace: Path) -> None:
    difference = tampered(trace, lambda lines: lines[1]["events"].clear())
    assert str(difference) == "iteration 0 (line 2), plan: recorded 'a plan', replayed 'none: no request holds a slot'"


def test_more_plans_than_may_be_in_flight_are_a_difference(trace: Path) -> None:
    difference = tampered(trace, lambda lines: lines[1]["in_flight"].append(2.0))
    assert (difference.recorded, difference.replayed) == ("plan 2", "none: as many steps are in flight as there may be")


def test_a_starved_call_that_was_none_is_a_difference(trace: Path) -> None:
    starve = {"kind": "starve", "id": "", "now": 1.0}

    def change(lines: list[dict[str, Any]]) -> None:
        lines[1]["events"].append({**starve, "step": [2, 0]})

    assert tampered(trace, change).key == "events[3]"


def test_the_bucket_is_kept_and_not_compared(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    scheduler = Scheduler(make_config(), trace=records.append)
    scheduler.add(make_request("a", 4, 1), 0.25)
    scheduler.update(scheduler.schedule(0.5), StepResult((), (5,)), 0.75, bucket="d0.p16.w2")
    assert_replays(write_trace(tmp_path / "trace.jsonl", make_config(), records))


def test_an_id_may_end_by_a_stop_string_and_by_a_stop_id_in_one_record(tmp_path: Path) -> None:
    """The second request of that id is the one that the update ends."""
    harness = Harness(lag=0, sample=lambda *_: 1007)
    harness.add(make_request("a", 4, 9))
    harness.step()
    harness.abort("a", reason=FinishReason.STOP)
    harness.add(stopping_request("a"))
    harness.run()
    assert harness.records[-1]["completed"] == ["a", "a"]
    assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))


def test_expiries_of_one_call_may_fill_several_records(tmp_path: Path) -> None:
    count = 2 * MAX_EVENTS + 40
    harness = Harness(make_config(max_queue_requests=count, max_queue_tokens=1 << 20, max_num_seqs=1))
    harness.add(make_request("first", 4, 9))
    harness.add(*(make_request(f"r{index}", deadline_at=1.5) for index in range(count)))
    harness.run()
    assert [record.get("kind") for record in harness.records[:7]] == [
        "events",
        "events",
        None,
        None,
        *["events"] * 2,
        None,
    ]
    assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))


def test_what_comes_of_one_call_is_in_one_record_also_where_events_have_piled_up(tmp_path: Path) -> None:
    """Two are displaced by two, as the last events before the record is full."""
    config = make_config(max_num_seqs=1, max_queue_requests=2, queue_displacement=True)
    harness = Harness(config)
    harness.add(make_request("runs", 4, 9, priority=-1), *(make_request(name, priority=1) for name in ("b", "c")))
    harness.step()
    harness.add(*(make_request(f"r{index}", 60, 60) for index in range(MAX_EVENTS - 1)))
    assert harness.add_all([make_request("d"), make_request("e")]) is None
    harness.run()
    piled = harness.records[1]
    assert piled["kind"] == "events" and len(piled["events"]) == MAX_EVENTS + 3
    last = [(event["kind"], event["id"], event.get("together")) for event in piled["events"][-4:]]
    assert last == [("abort", "c", None), ("abort", "b", None), ("add", "d", 2), ("add", "e", None)]
    assert_replays(write_trace(tmp_path / "trace.jsonl", harness.config, harness.records))


def test_a_plan_whose_step_failed_is_made_at_its_instant(tmp_path: Path) -> None:
    """An engine that dies ends every request while a plan is in flight: no record tells of that plan."""
    records: list[dict[str, Any]] = []
    scheduler = Scheduler(make_config(), trace=records.append)
    scheduler.add(make_request("a", deadline_at=2.0), 0.0)
    scheduler.schedule(1.5)
    scheduler.add(make_request("b"), 2.5)
    scheduler.abort("a", 3.0, FinishReason.ERROR)
    scheduler.flush_trace()
    report = assert_replays(write_trace(tmp_path / "trace.jsonl", make_config(), records))
    assert (report.num_iterations, report.num_plans, report.num_requests) == (0, 1, 2)


def test_a_line_cut_by_a_crash_is_left_out_and_noted(trace: Path) -> None:
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-20])
    report, written = replayed_bytes(trace)
    assert (report.difference, report.truncated_line, report.num_iterations) == (None, 7, 5)
    assert whole.startswith(written) and trace.read_bytes().startswith(written)
