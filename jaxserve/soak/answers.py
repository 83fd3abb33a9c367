"""What an answer must look like, and which ends a client's action may have. Pure: bytes in, a verdict out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.soak.kinds import SCHEMA, Action

COMPLETED, REJECTED, EXPIRED, UNFOLLOWABLE = "completed", "rejected", "expired", "unfollowable"
REFUSED, FAILED, UNAVAILABLE, LEFT, STUCK, BROKEN = "refused", "failed", "unavailable", "left", "stuck", "broken"
"""Ends: 200 and whole; 429 or displaced; 504; no token fits the grammar; another 4xx; 500; 503; the client went away;
no end came; the answer breaks a rule."""

_BY_STATUS = {429: REJECTED, 504: EXPIRED, 500: FAILED, 503: UNAVAILABLE}
_BY_TYPE = {"rate_limit_error": REJECTED, "timeout_error": EXPIRED, "service_unavailable_error": UNAVAILABLE}
_EVERY_KIND = frozenset((COMPLETED, REJECTED))
_MORE = {
    "cancel": {LEFT},
    "deadline": {EXPIRED},
    "grpc_cancel": {LEFT},
    "grpc_deadline": {EXPIRED},
    "schema": {UNFOLLOWABLE},
    "regex": {UNFOLLOWABLE},
    "duplicate": {REFUSED},
}
_UNDER_FAULTS = frozenset((FAILED, UNAVAILABLE))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an action ended.

    Attributes:
      outcome: one of the ends above.
      problem: what is wrong with the answer; "": nothing.
    """

    outcome: str
    problem: str = ""


def allowed(kind: str, outcome: str, faults: bool) -> bool:
    """Whether an action of a kind may end so; `faults`: a fault plan is at work."""
    if faults and outcome in _UNDER_FAULTS:
        return True
    if kind in ("invalid", "grpc_invalid"):
        return outcome in (REFUSED, REJECTED)
    return outcome in _EVERY_KIND or outcome in _MORE.get(kind, ())


def judge_error(status: int, body: bytes) -> Verdict:
    """An answer that is not 200: its body must be an error object, as strict JSON."""
    outcome = _BY_STATUS.get(status, REFUSED if 400 <= status < 500 else FAILED)
    try:
        error = _strict(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Verdict(BROKEN, f"{status} without an error object: {body[:200]!r}")
    if not error.get("message") or set(error) != {"message", "type", "param", "code"}:
        return Verdict(BROKEN, f"{status} with the error {error}")
    return Verdict(_of_error(error) if outcome == REFUSED else outcome)


def judge_whole(action: Action, body: bytes) -> Verdict:
    """An answer of 200 that is no stream."""
    try:
        document = _strict(body)
        choices = document["choices"]
        texts = {choice["index"]: _text(choice) for choice in choices}
        ends = {choice["index"]: choice["finish_reason"] for choice in choices}
        return _judge(action, texts, ends, document["usage"], [document])
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(BROKEN, f"{error!r} in {body[:200]!r}")


def judge_stream(action: Action, body: bytes) -> Verdict:
    """A whole event stream: events of JSON, one end per choice, usage, `[DONE]`; or an error object, then nothing."""
    events = body.split(b"\n\n")
    if events.pop() != b"":
        return Verdict(BROKEN, f"the stream ends inside an event: {body[-200:]!r}")
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    documents: list[dict[str, Any]] = []
    usage = None
    for number, event in enumerate(events):
        if not event.startswith(b"data: ") or b"\n" in event:
            return Verdict(BROKEN, f"no event: {event[:200]!r}")
        data, is_last = event.removeprefix(b"data: "), number == len(events) - 1
        if data == b"[DONE]":
            if not is_last:
                return Verdict(BROKEN, "events follow [DONE]")
            return _judge(action, texts, ends, usage, documents)
        try:
            document = _strict(data)
            if "error" in document:
                return Verdict(_of_error(document["error"]), "" if is_last else "events follow the error")
            documents.append(document)
            usage = document.get("usage") or usage
            for choice in document["choices"]:
                index = choice["index"]
                if index in ends:
                    return Verdict(BROKEN, f"choice {index} goes on after its end")
                texts[index] = texts.get(index, "") + _text(choice)
                if choice["finish_reason"] is not None:
                    ends[index] = choice["finish_reason"]
        except (ValueError, KeyError, TypeError) as error:
            return Verdict(BROKEN, f"{error!r} in {data[:200]!r}")
    return Verdict(BROKEN, f"no [DONE] and no error: {body[-200:]!r}")


def _judge(
    action: Action,
    texts: dict[int, str],
    ends: dict[int, str],
    usage: dict[str, Any] | None,
    documents: Sequence[dict[str, Any]],
) -> Verdict:
    body = action.body
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    num_choices = body.get("n", 1) * prompts
    if sorted(ends) != list(range(num_choices)) or set(texts) - set(ends):
        return Verdict(BROKEN, f"{num_choices} choices were asked for; ends are {ends}")
    if strange := set(ends.values()) - {"stop", "length"}:
        return Verdict(BROKEN, f"ends are {strange}")
    if usage is None or not 0 < usage["completion_tokens"] <= num_choices * body["max_tokens"]:
        return Verdict(BROKEN, f"usage is {usage} for {num_choices} choices of {body['max_tokens']} tokens")
    if body.get("ignore_eos") and usage["completion_tokens"] != num_choices * body["max_tokens"]:
        return Verdict(BROKEN, f"usage is {usage} with ignore_eos and max_tokens {body['max_tokens']}")
    return Verdict(COMPLETED, _problem_of_text(action, texts, ends, documents))


def _problem_of_text(
    action: Action, texts: dict[int, str], ends: dict[int, str], documents: Sequence[dict[str, Any]]
) -> str:
    body = action.body
    for index, text in texts.items():
        if action.kind == "stop" and not body["include_stop_str_in_output"]:
            for stop in body["stop"]:
                if stop in text:
                    return f"the text {text!r} has the stop string {stop!r}"
        if ends[index] != "stop":
            continue
        if action.kind == "regex" and re.fullmatch(body["structured_outputs"]["regex"], text) is None:
            return f"{text!r} does not match {body['structured_outputs']['regex']!r}"
        if action.kind == "schema" and not follows_schema(text):
            return f"{text!r} does not follow the schema"
    if action.kind == "logprobs":
        shown = [c.get("logprobs") for document in documents for c in document["choices"] if _text(c)]
        if any(each is None for each in shown):
            return "a choice has a text and no logprobs"
    return ""


def follows_schema(text: str) -> bool:
    """Whether a text is a document of `SCHEMA`."""
    try:
        value = _strict(text)
    except ValueError:
        return False
    sizes = SCHEMA["properties"]["size"]["enum"]  # type: ignore[index]
    return (
        isinstance(value, dict)
        and set(value) == {"ok", "size"}
        and type(value["ok"]) is bool
        and value["size"] in sizes
    )


def _of_error(error: dict[str, Any]) -> str:
    if error.get("code") == "unfollowable":
        return UNFOLLOWABLE
    kind = str(error.get("type"))
    return _BY_TYPE.get(
        kind, REFUSED if kind in ("invalid_request_error", "not_found_error", "conflict_error") else FAILED
    )


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


def _strict(text: str | bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
