"""Which answers a soak takes for right, and which it names."""

import json

import pytest

from jaxserve.soak import answers
from jaxserve.soak.answers import allowed, judge_error, judge_stream, judge_whole
from jaxserve.soak.kinds import Action


def event(document):
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"


def chunk(text, finish=None, index=0):
    return event({"choices": [{"index": index, "text": text, "finish_reason": finish}], "usage": None})


def usage(count):
    return event({"choices": [], "usage": {"completion_tokens": count}})


DONE = event(b"[DONE]")
ACTION = Action(0.0, 1, "stream", {"prompt": "a", "max_tokens": 4})


def test_a_whole_stream_is_right():
    verdict = judge_stream(ACTION, chunk("a") + chunk("b", "stop") + usage(2) + DONE)
    assert verdict.outcome == answers.COMPLETED and not verdict.problem


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (chunk("a", "stop") + usage(2), "no [DONE]"),
        (chunk("a", "stop") + usage(2) + DONE + chunk("b"), "events follow"),
        (chunk("a") + usage(2) + DONE, "1 choices were asked for"),
        (chunk("a", "stop") + chunk("b") + usage(2) + DONE, "after its end"),
        (chunk("a", "stop") + usage(5) + DONE, "usage is"),
        (chunk("a", "stop") + DONE, "usage is"),
        (chunk("a", "abort") + usage(2) + DONE, "ends are"),
        (event(b'{"choices": NaN}') + DONE, "NaN is not JSON"),
        (chunk("a", "stop") + usage(2) + DONE[:-1], "inside an event"),
        (b"", "no [DONE]"),
    ],
)
def test_a_broken_stream_is_named(body, problem):
    verdict = judge_stream(ACTION, body)
    assert verdict.outcome == answers.BROKEN and problem in verdict.problem


def test_an_error_ends_a_stream_and_nothing_may_follow_it():
    error = event({"error": {"message": "m", "type": "timeout_error", "param": None, "code": None}})
    assert judge_stream(ACTION, chunk("a") + error).outcome == answers.EXPIRED
    assert judge_stream(ACTION, error + DONE).problem


def test_an_error_without_an_error_object_is_broken():
    error = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}}
    assert judge_error(400, json.dumps(error).encode()).outcome == answers.REFUSED
    assert judge_error(429, json.dumps(error).encode()).outcome == answers.REJECTED
    assert judge_error(500, json.dumps(error).encode()).outcome == answers.FAILED
    assert judge_error(400, b"Bad Request").outcome == answers.BROKEN


def whole(text, finish="stop"):
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()


def test_texts_must_follow_what_was_asked_of_them():
    regex = Action(0.0, 1, "regex", {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[ab]+"}})
    assert not judge_whole(regex, whole("abba")).problem
    assert "does not match" in judge_whole(regex, whole("abc")).problem
    assert not judge_whole(regex, whole("abc", "length")).problem, "cut off, so it need not match"
    schema = Action(0.0, 1, "schema", {"prompt": "a", "max_tokens": 9})
    assert not judge_whole(schema, whole('{"ok": true, "size": "small"}')).problem
    for text in ('{"ok": 1, "size": "small"}', '{"ok": true}', "{", '{"ok": true, "size": "huge"}'):
        assert "schema" in judge_whole(schema, whole(text)).problem, text
    stop = Action(0.0, 1, "stop", {"prompt": "a", "max_tokens": 9, "stop": ["x"], "include_stop_str_in_output": False})
    assert "stop string" in judge_whole(stop, whole("axb")).problem


def test_only_faults_excuse_failures():
    assert not allowed("stream", answers.FAILED, False) and allowed("stream", answers.FAILED, True)
    assert not allowed("stream", answers.BROKEN, True) and not allowed("stream", answers.STUCK, True)
    assert not allowed("invalid", answers.COMPLETED, True) and allowed("invalid", answers.REFUSED, False)
    assert allowed("cancel", answers.LEFT, False) and not allowed("stream", answers.LEFT, False)
