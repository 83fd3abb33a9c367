"""The load client: when it sends, and what it makes of every kind of answer."""

import asyncio
import json
import time

import pytest

from jaxserve.bench.load.client import Item, LoadClient
from jaxserve.bench.load.record import COMPLETED, FAILED, REFUSED
from tests.bench.scripted_server import Script, ScriptedServer, token, usage

SLACK_S = 0.25
"""By how much a busy machine may delay what has an instant."""


def send(server, items, **settings):
    client = LoadClient(server.url, "m", **({"api_key": None, "timeout_s": 20.0} | settings))
    return asyncio.run(client.run(items))


def outcome_of(script, max_tokens=3, **settings):
    with ScriptedServer(lambda number, body: script) as server:
        (record,) = send(server, [Item(0.0, (1, 2), max_tokens)], **settings)
    return record


def test_instants_of_tokens_follow_the_server():
    record = outcome_of(Script(first_s=0.2, gap_s=0.05), max_tokens=5)
    assert (record.outcome, record.num_output, len(record.token_at)) == (COMPLETED, 5, 5)
    assert 0.2 <= record.ttft_s < 0.2 + SLACK_S
    assert all(0.045 <= gap < 0.05 + SLACK_S for gap in record.gaps_s)
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 4)
    assert record.ended_at == record.token_at[-1]


def test_a_request_is_token_ids_greedy_and_without_eos():
    with ScriptedServer(lambda number, body: Script()) as server:
        send(server, [Item(0.0, (7, 8, 9), 2)], api_key="secret", return_token_ids=True)
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [7, 8, 9],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1") and "Bearer secret" in server.heads[0]


@pytest.mark.parametrize("piece", [1, 7, 64])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_chunks_and_events_may_be_cut_anywhere(piece, newline):
    record = outcome_of(Script(piece=piece, newline=newline), max_tokens=4)
    assert (record.outcome, record.num_output, len(record.token_at)) == (COMPLETED, 4, 4)


def test_tokens_are_counted_by_the_server_not_by_events():
    events = [token("two"), token("three", "length"), usage(5), "[DONE]"]
    record = outcome_of(Script(events=events), max_tokens=5)
    assert (record.outcome, record.num_output, len(record.token_at)) == (COMPLETED, 5, 2)


def test_an_end_event_without_a_token_is_not_a_token():
    events = [token(), token(), token("", "length"), usage(2), "[DONE]"]
    record = outcome_of(Script(events=events), max_tokens=2)
    assert (record.outcome, len(record.token_at)) == (COMPLETED, 2)


@pytest.mark.parametrize("keep_open", [False, True])
@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_no_failure(status, keep_open):
    body = json.dumps({"error": {"message": "the queue is full"}})
    record = outcome_of(Script(status, {"Retry-After": "7"}, body, keep_open=keep_open))
    assert (record.outcome, record.status, record.retry_after_s) == (REFUSED, status, 7.0)
    assert record.error == f"{status}: the queue is full"
    assert 0 <= record.ended_at - record.due_at < SLACK_S


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(400, {}, json.dumps({"error": {"message": "too long"}})), "400: too long"),
        (Script(500, {}, "broken"), "500: broken"),
        (Script(events=[token(), json.dumps({"error": {"message": "died"}})]), "died"),
        (Script(events=[token(), token()]), "the connection ended before the stream did"),
        (Script(events=[token(), "[DONE]"]), "the stream had no usage.completion_tokens"),
        (Script(events=[usage(3), "[DONE]"]), "the stream had no event with a token"),
        (Script(first_s=5.0), "no end within 0.3 s"),
    ],
)
def test_everything_else_failed_and_says_why(script, error):
    record = outcome_of(script, timeout_s=0.3)
    assert record.outcome == FAILED
    assert error in record.error


def test_no_server_is_a_failure():
    with ScriptedServer(lambda number, body: Script()) as server:
        pass
    (record,) = send(server, [Item(0.0, (1,), 1)])
    assert (record.outcome, record.status) == (FAILED, 0) and "no connection" in record.error


def test_a_slow_answer_delays_no_later_arrival():
    dues = [0.0, 0.1, 0.2, 0.3]
    with ScriptedServer(lambda number, body: Script(first_s=0.6)) as server:
        records = send(server, [Item(at, (1,), 1) for at in dues])
    arrived = [at - records[0].due_at for at in server.arrived_at]
    assert all(due <= at < due + SLACK_S for due, at in zip(dues, arrived, strict=True))


def test_a_late_client_is_not_late_for_ever_and_its_lateness_counts():
    dues = [0.0, 0.1, 0.2, 0.7]

    async def stalled(client, items):
        asyncio.get_running_loop().call_later(0.1, time.sleep, 0.4)  # over the second and third arrival
        return await client.run(items)

    with ScriptedServer(lambda number, body: Script()) as server:
        client = LoadClient(server.url, "m", api_key=None, timeout_s=20.0)
        records = asyncio.run(stalled(client, [Item(at, (1,), 1) for at in dues]))
    start = records[0].due_at
    assert [record.due_at - start for record in records] == pytest.approx(dues)
    late = [record.sent_at - record.due_at for record in records]
    assert late[2] > 0.15 and records[2].ttft_s > 0.15
    assert late[3] < SLACK_S
