"""The iteration trace: keys, placement of events, the file."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.core import FinishReason
from jaxserve.scheduler import SCHEMA_VERSION, Scheduler, StepResult, TraceWriter
from jaxserve.scheduler.trace import MAX_EVENTS
from tests.scheduler.harness import Harness, make_config, make_request

DECISIONS = {"iteration", "now", "decode", "prefill", "prefill_emitted", "preempted", "unused_budget", "bucket"}
DECISIONS |= {"in_flight", "updated_at", "front_waits_for"}
OUTCOMES = {"rejected", "completed", "aborted", "queue", "active", "pages_free", "pages_cached", "pages_owned"}


def test_a_record_has_every_key_of_the_contract_and_turns_into_json() -> None:
    harness = Harness()
    harness.add(make_request("a", 12, 3))
    harness.run()
    for record in harness.records:
        assert set(record) >= DECISIONS | OUTCOMES
        assert json.loads(json.dumps(record)) == record


def test_a_record_says_what_the_plan_did_and_what_is_left_after_it() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.add(make_request("a", 12, 2), make_request("b", 4, 1))
    harness.run()
    first, second, third, fourth = harness.records
    assert (first["prefill"], first["prefill_emitted"], first["unused_budget"]) == ([["a", 8]], [], 8)
    assert (first["active"], first["queue"], first["pages_owned"]) == (["a"], ["b"], 2)
    assert (second["prefill_emitted"], second["now"], second["iteration"]) == (["a"], 1.0, 1)
    assert (third["decode"], third["completed"], third["active"], third["pages_owned"]) == (["a"], ["a"], [], 0)
    assert fourth["completed"] == ["b"]


def test_events_hold_what_came_in_since_the_record_before_with_its_place() -> None:
    harness = Harness(make_config(max_num_seqs=1, max_queue_requests=2), lag=1)
    harness.add(make_request("a", 4, 9), make_request("b", 5, 6, priority=3, deadline_at=2.5))
    harness.step()
    harness.add(make_request("c", 4, 2, tenant="t"), make_request("d"))
    harness.abort("a")
    harness.run()
    events = [event for record in harness.records for event in record["events"]]
    short = [(e["kind"], e["id"], e["now"], e["step"], e.get("outcome"), e.get("reason")) for e in events]
    assert short == [
        ("add", "a", 0.0, [0, 0], "slot", None),
        ("add", "b", 0.0, [0, 0], "queue", None),
        ("add", "c", 1.0, [1, 0], "queue", None),
        ("add", "d", 1.0, [1, 0], "queue_full_requests", None),
        ("abort", "a", 1.0, [1, 0], None, "abort"),
        ("expire", "b", 3.0, [3, 2], None, None),
    ]
    assert (events[1]["prompt"], events[1]["max_tokens"], events[1]["priority"]) == (5, 6, 3)
    assert (events[1]["deadline_at"], events[2]["tenant"]) == (2.5, "t")


def test_plans_in_flight_and_updates_are_told_with_their_instants() -> None:
    harness = Harness(lag=2)
    harness.add(make_request("a", 4, 3))
    harness.run()
    told = [(record["now"], record["in_flight"], record["updated_at"]) for record in harness.records]
    assert told == [(0.0, [1.0, 2.0], 2.0), (1.0, [2.0], 3.0), (2.0, [], 4.0)]
    harness.add(make_request("b", 4, 3))
    harness.step()
    harness.abort("b")
    harness.scheduler.flush_trace()
    assert harness.records[-1]["in_flight"] == [5.0]


def test_ends_are_listed_by_what_they_are() -> None:
    harness = Harness()
    harness.add(*(make_request(name, 4, 9) for name in ("stopped", "failed", "aborted", "goes_on")))
    harness.abort("stopped", reason=FinishReason.STOP)
    harness.abort("failed", reason=FinishReason.ERROR)
    harness.abort("aborted")
    harness.step()
    (record,) = harness.records
    assert [record[key] for key in ("completed", "failed", "aborted")] == [["stopped"], ["failed"], ["aborted"]]


def test_refusals_without_an_iteration_are_written_before_they_pile_up() -> None:
    harness = Harness()
    too_long = [make_request(f"r{i}", 60, 60) for i in range(2 * MAX_EVENTS + 3)]
    for request in too_long:
        harness.add(request)
    assert [record["kind"] for record in harness.records] == ["events", "events"]
    assert all(len(record["events"]) == len(record["rejected"]) == MAX_EVENTS for record in harness.records)
    harness.add(make_request("a", 4, 1))
    harness.run()
    last = harness.records[-1]
    assert "kind" not in last and len(last["events"]) == 4
    assert [name for record in harness.records for name in record["rejected"]] == [r.request_id for r in too_long]
    assert json.loads(json.dumps(harness.records)) == harness.records


def test_a_flush_writes_what_came_after_the_last_iteration_once() -> None:
    harness = Harness()
    harness.scheduler.flush_trace()
    assert harness.records == []
    harness.add(make_request("a", 4, 9))
    harness.step()
    harness.abort("a")
    harness.add(make_request("b", 60, 60))
    for _ in range(2):
        harness.scheduler.flush_trace()
    iteration, flushed = harness.records
    assert "kind" not in iteration
    assert (flushed["kind"], flushed["aborted"], flushed["rejected"]) == ("events", ["a"], ["b"])
    assert [(e["kind"], e["id"], e["step"]) for e in flushed["events"]] == [
        ("abort", "a", [1, 1]),
        ("add", "b", [1, 1]),
    ]
    Scheduler(make_config()).flush_trace()  # nothing to do without a trace


def test_the_bucket_that_ran_is_recorded() -> None:
    records: list[dict[str, object]] = []
    scheduler = Scheduler(make_config(), trace=records.append)
    scheduler.add(make_request("a", 4, 1), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, StepResult((), (5,)), 0.0, bucket="d0.p16.w2")
    assert records[0]["bucket"] == "d0.p16.w2"


def test_a_trace_file_is_a_header_and_one_line_per_iteration(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, model="tiny", config=make_config())
    writer({"iteration": 0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # whole before it is closed
    assert lines[0]["schema_version"] == SCHEMA_VERSION and lines[0]["model"] == "tiny"
    assert lines[0]["config"]["prefill_chunk"] == 8
    assert lines[1] == {"iteration": 0}
    writer.close()
    writer({"iteration": 1})
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        writer = TraceWriter("/dev/full")
        writer({"iteration": 0})
    (message,) = caplog.messages
    assert "trace_file /dev/full ends here" in message


LIMITED = """
import resource, signal, sys
from jaxserve.scheduler import TraceWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = TraceWriter(sys.argv[1], model="tiny", died={"error": "x"} if sys.argv[2:] else None)
for number in range(100):
    writer({"iteration": number, "padding": "x" * 50})
print(writer.num_errors)
"""


@pytest.mark.parametrize("died", [(), ("died",)], ids=["trace", "crash dump"])
def test_a_disk_that_fills_up_amid_a_line_leaves_whole_lines(tmp_path: Path, died: tuple[str, ...]) -> None:
    path = tmp_path / "trace.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, path, *died], capture_output=True, text=True)
    assert done.stdout == "1\n" and "ends here: [Errno 27]" in done.stderr
    text = path.read_text()
    assert text.endswith("\n") and 900 < len(text) < 1000, "the write that failed took a part"
    header, *records = map(json.loads, text.splitlines())
    assert header["model"] == "tiny" and ("died" in header) == bool(died)
    assert [record["iteration"] for record in records] == list(range(len(records)))
