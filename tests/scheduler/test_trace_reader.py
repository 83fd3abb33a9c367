"""Reading a trace: typed records, and damage named by file, line and rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core import FinishReason
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import AbortEvent, AddEvent, EventsRecord, ExpireEvent, IterationRecord
from tests.scheduler.harness import Harness, make_config, make_request


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A header, five iterations with one plan in flight, and a record of events alone."""
    harness = Harness(make_config(max_num_seqs=1), lag=1)
    harness.add(make_request("a", 12, 3), make_request("b", 4, 2, tenant="t", deadline_at=1.5))
    harness.step()
    harness.abort("a", reason=FinishReason.STOP)
    harness.add(make_request("c", 4, 3))
    harness.run()
    harness.add(make_request("d", 60, 60))
    harness.scheduler.flush_trace()
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, model="tiny", config=harness.config)
    for record in harness.records:
        writer(record)
    writer.close()
    return path


def change(path: Path, line: int, edit: Callable[[dict[str, Any]], Any]) -> str:
    """What is said of the file after `edit` was made to the object of `line` (from 1)."""
    lines = path.read_text().splitlines()
    value = json.loads(lines[line - 1])
    edit(value)
    lines[line - 1] = json.dumps(value)
    return complaint(path, "".join(f"{line}\n" for line in lines))


def complaint(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        list(TraceReader(path))
    return str(raised.value).replace(str(path), "FILE")


def test_records_are_typed_and_can_be_read_twice(trace: Path) -> None:
    reader = TraceReader(trace)
    assert (reader.header.model, reader.header.config) == ("tiny", make_config(max_num_seqs=1, max_steps_ahead=1))
    records = list(reader)
    assert [type(record) for record in records] == [IterationRecord] * 5 + [EventsRecord]
    assert list(reader) == records and reader.truncated_line is None
    first, second, *_, last = records
    assert isinstance(first, IterationRecord) and isinstance(second, IterationRecord)
    assert (first.line, first.iteration, first.prefill, first.active) == (2, 0, (("a", 8),), ("b",))
    assert (first.in_flight, first.completed, first.completed_in_update) == ((1.0,), ("a",), ())
    assert first.events == (
        AddEvent("a", 0.0, 0, 0, (), 12, 3, 0, "", "", None, "slot", False),
        AddEvent("b", 0.0, 0, 0, (), 4, 2, 0, "t", "", 1.5, "queue", False),
        AbortEvent("a", 1.0, 1, 0, (), FinishReason.STOP),
        AddEvent("c", 1.0, 1, 0, (), 4, 3, 0, "", "", None, "queue", False),
    )
    assert second.events == (ExpireEvent("b", 2.0, 2, 1, ()),)
    updates = [(r.updated_at, r.completed_in_update) for r in records if isinstance(r, IterationRecord)]
    assert updates == [(1.0, ()), (2.0, ()), (3.0, ()), (4.0, ()), (5.0, ("c",))]
    assert (last.line, last.rejected, last.in_flight) == (7, ("d",), ())


@pytest.mark.parametrize(
    ("line", "edit", "message"),
    [
        (1, lambda h: h.update(kind="x"), 'FILE line 1: kind is "x"; it must be "header": a trace begins with one'),
        (1, lambda h: h.update(schema_version=2), "schema_version is 2; this version of jaxserve reads 3, 4 and 5;"),
        (1, lambda h: h.update(died={}), "died is {}; it must be an object whose `error` is a text"),
        (1, lambda h: h.update(died={"error": 5}), "it must be an object whose `error` is a text"),
        (1, lambda h: h.update(config=None), "config is null; it must be an object, the scheduler's settings"),
        (1, lambda h: h["config"].update(a=1), "config has a; this version of jaxserve knows no such setting"),
        (1, lambda h: h["config"].update(page_size=3), "config: page_size is 3; it must be a power of two"),
        (2, lambda r: r.update(kind="x"), 'FILE line 2: kind is "x"; it must be "events" or absent'),
        (3, lambda r: r.pop("queue"), "FILE line 3: queue is missing; it must be a list of request ids"),
        (3, lambda r: r.update(queue=[1]), "queue is [1]; it must be a list of request ids"),
        (3, lambda r: r.update(prefill=[["a", "b"]]), 'prefill is [["a", "b"]]; it must be a list of [request id'),
        (3, lambda r: r.update(pages_free=-1), "pages_free is -1; it must be an integer of at least 0"),
        (3, lambda r: r.update(pages_free=True), "pages_free is true; it must be an integer of at least 0"),
        (3, lambda r: r.update(now="1"), 'now is "1"; it must be a number of seconds'),
        (3, lambda r: r.update(in_flight=[None]), "in_flight is [null]; it must be a list of instants"),
        (3, lambda r: r.update(updated_at="x"), 'updated_at is "x"; it must be a number of seconds'),
        (
            3,
            lambda r: r.update(iteration=2),
            "iteration is 2; it must be 1, the next one: lines are missing or doubled",
        ),
        (3, lambda r: r.update(preempted_next=None), "preempted_next is null; it must be a list of request ids"),
        (
            3,
            lambda r: r.update(front_waits_for="?"),
            'front_waits_for is "?"; it must be null or one of slot, preemption',
        ),
        (3, lambda r: r.pop("front_waits_for"), "front_waits_for is missing; it must be null or one of slot, "),
        (3, lambda r: r.update(named=[["a", "b"]]), 'named is [["a", "b"]]; it must be a list of [request id, page'),
        (2, lambda r: r["events"][0].update(pages=[0.5]), "pages is [0.5]; it must be a list of page numbers"),
        (2, lambda r: r["events"][0].update(pages=[0], scores=1), "scores is 1; it must be true or false"),
        (2, lambda r: r.update(events={}), "events is {}; it must be a list of events"),
        (2, lambda r: r["events"].append(5), "FILE line 2 event 4 is 5; it must be an object"),
        (2, lambda r: r["events"][0].update(prompt=0), "FILE line 2 event 0: prompt is 0; it must be an integer of at"),
        (2, lambda r: r["events"][0].update(together=1), "together is 1; it must be an integer of at least 2"),
        (
            2,
            lambda r: r["events"][0].update(together=3),
            "line 2 event 0: together is 3; it must be the number of",
        ),
        (2, lambda r: r["events"][0].update(tenant=None), "tenant is null; it must be a text"),
        (
            2,
            lambda r: r["events"][1].update(kind="?"),
            'kind is "?"; it must be add, abort, expire, starve, reset_',
        ),
        (2, lambda r: r["events"][2].update(reason="?"), 'reason is "?"; it must be one of stop, length, abort'),
        (2, lambda r: r["events"][3].update(step=[3, 0]), "step is [3, 0]; it must be [0 to 2, 0]"),
        (2, lambda r: r["events"][3].update(step=[1]), "step is [1]; it must be a pair of counts"),
    ],
)
def test_damage_is_named_by_line_key_and_rule(
    trace: Path, line: int, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    assert message in change(trace, line, edit)


def test_a_line_that_is_no_json_is_damage_unless_it_is_the_last_without_an_end(trace: Path) -> None:
    text = trace.read_text()
    assert "FILE line 8 is not JSON: " in complaint(trace, text + '{"iteration":\n')
    trace.write_text(text + '{"iteration":')
    reader = TraceReader(trace)
    assert len(list(reader)) == 6 and reader.truncated_line == 8


def test_a_file_without_a_whole_header_holds_nothing(trace: Path) -> None:
    for text in ("", '{"kind":"header"'):
        assert complaint(trace, text) == (
            "trace FILE holds no whole line; it must begin with a header; record it again"
        )
    assert "FILE line 1 is [1]; it must be an object" in complaint(trace, "[1]\n")


def test_a_missing_line_is_damage(trace: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    # The second iteration's events tell of it too; the plainer message comes first.
    assert "line 2: iteration is 1; it must be 0" in complaint(trace, "".join(lines[:1] + lines[2:]))
