"""TokenEvents: events kept by column read like a list of events."""

from __future__ import annotations

from jaxserve.scheduler import Scheduler, StepResult, TokenEvent, TokenEvents
from tests.scheduler.harness import STOP_ID, make_config, make_request, stopping_request

END = TokenEvent("c", 9, "decode", 3, "length")
CHUNKS = [TokenEvent("d", 5, "prefill", 0), TokenEvent("e", None, "prefill", 1, "length")]


def test_columns_read_like_a_list_of_events() -> None:
    events = TokenEvents(("a", "c"), (7, 9), [1, 3], {3: END}, CHUNKS)
    listed = [TokenEvent("a", 7, "decode", 1), END, *CHUNKS]
    assert list(events) == listed and len(events) == 4
    assert events[1] == END and events[-1] == CHUNKS[1] and events[:2] == listed[:2]
    assert events.ended == [END, CHUNKS[1]] and events.num_tokens == 3
    assert not TokenEvents() and list(TokenEvents()) == []


def test_an_update_tells_tokens_and_ends_by_row() -> None:
    scheduler = Scheduler(make_config())
    for request in (make_request("a", output=3), stopping_request("b"), make_request("c", output=2)):
        scheduler.add(request, 0.0)
    plan = scheduler.schedule(0.0)
    assert [event.source for event in scheduler.update(plan, StepResult((), (1, 2, 3)), 0.0)] == ["prefill"] * 3
    plan = scheduler.schedule(1.0)
    events = scheduler.update(plan, StepResult((4, STOP_ID, 5), ()), 1.0)
    assert (list(events.request_ids), list(events.token_ids)) == (["a", "b", "c"], [4, STOP_ID, 5])
    assert {row: event.finish_reason for row, event in events.ends.items()} == {1: "stop", 2: "length"}


def test_rows_of_requests_that_ended_meanwhile_are_left_out() -> None:
    scheduler = Scheduler(make_config())
    for name in "abc":
        scheduler.add(make_request(name, output=4), 0.0)
    scheduler.update(scheduler.schedule(0.0), StepResult((), (1, 2, 3)), 0.0)
    plan = scheduler.schedule(1.0)
    scheduler.abort("b", 1.0)
    events = scheduler.update(plan, StepResult((4, 5, 6), ()), 1.0)
    assert list(events) == [TokenEvent("a", 4, "decode", 0), TokenEvent("c", 6, "decode", 2)]
