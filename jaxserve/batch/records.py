"""The form of a line, OpenAI's: what is asked in the input, what is answered in the output.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}

    {"id": "batch_req_1", "custom_id": "a",
     "response": {"status_code": 200, "request_id": "cmpl-...", "body": {...}}, "error": null}

The number in `id` is the input's line. A line that never became a request has `response` null and `error`
{"code", "message"}. A request that was refused or failed has both: the response that HTTP would have given, and its
error in short.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from jaxserve.server.errors import KINDS, ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ID_PREFIX = "batch_req_"
DUPLICATE = "duplicate_custom_id"
_ID = re.compile(ID_PREFIX + "([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is no request: a stable word for programs, and the line's number, the rule and the value."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of the input.

    Attributes:
      number: from 1; blank lines count.
      custom_id: None where the line has no usable one.
      url: one of `URLS`, unless there is an error.
      error: None for a request.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the output.

    Attributes:
      number: of the input's line; None in a file that this program has not written.
      response: None for a line that never became a request.
      error: None for an answer.
    """

    number: int | None
    custom_id: str | None
    response: Mapping[str, Any] | None
    error: LineError | None

    @property
    def answers_id(self) -> bool:
        """Whether the custom_id has its result by this line; else it tells of one line of the input alone."""
        return self.custom_id is not None and not (self.error and self.error.code == DUPLICATE)

    def encode(self) -> bytes:
        """The line, with its end."""
        error = self.error and {"code": self.error.code, "message": self.error.message}
        return orjson.dumps(
            {
                "id": f"{ID_PREFIX}{self.number}",
                "custom_id": self.custom_id,
                "response": self.response,
                "error": error,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def parse_request(number: int, text: bytes) -> RequestLine:
    """A line of the input; a bad one has an error."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        return _bad(number, None, "invalid_json_line", f"not valid JSON: {exc}")
    if not isinstance(value, dict):
        return _bad(number, None, "invalid_json_line", "must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return _bad(number, None, "missing_custom_id", "custom_id must be a string of at least 1 character")
    method, url, body = value.get("method"), value.get("url"), value.get("body")
    if method != "POST":
        return _bad(number, custom_id, "invalid_method", f'method is {_short(method)}; it must be "POST"')
    if url not in URLS:
        return _bad(number, custom_id, "invalid_url", f"url is {_short(url)}; it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return _bad(number, custom_id, "invalid_body", "body must be a JSON object")
    if body.get("stream"):
        return _bad(number, custom_id, "invalid_body", "body.stream must be false or absent: a batch has no streams")
    return RequestLine(number, custom_id, url, body)


def too_long(number: int, limit: int) -> RequestLine:
    """A line over the limit, which nobody has read."""
    return _bad(number, None, "line_too_long", f"has more than {limit} bytes (max_line_bytes)")


def duplicate(line: RequestLine) -> RequestLine:
    """A line whose custom_id an earlier line has."""
    message = f"custom_id {_short(line.custom_id)} is that of an earlier line; it must be unique"
    return _bad(line.number, line.custom_id, DUPLICATE, message)


def answered(line: RequestLine, request_id: str, body: dict[str, Any]) -> Result:
    """A completion."""
    return Result(line.number, line.custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refused(line: RequestLine, error: ApiError) -> Result:
    """A request that was refused or failed."""
    request_id = f"{ID_PREFIX}{line.number}"
    response = {"status_code": error.http_status, "request_id": request_id, "body": error.body()}
    code = error.code or KINDS[error.kind].type
    return Result(line.number, line.custom_id, response, LineError(code, f"line {line.number}: {error.message}"))


def parse_result(text: bytes) -> Result:
    """A line of an output file.

    Raises:
      ValueError: it is none.
    """
    value = orjson.loads(text)
    if not isinstance(value, dict) or not {"id", "custom_id", "response", "error"} <= value.keys():
        raise ValueError("id, custom_id, response or error is missing")
    custom_id, error = value["custom_id"], value["error"]
    if not isinstance(custom_id, str | None) or not isinstance(error, dict | None):
        raise ValueError("custom_id must be a string or null, error an object or null")
    number = _ID.fullmatch(str(value["id"]))
    return Result(
        int(number[1]) if number else None,
        custom_id,
        None,  # not kept: a file may hold many
        LineError(str(error.get("code")), str(error.get("message"))) if error else None,
    )


def _bad(number: int, custom_id: str | None, code: str, rule: str) -> RequestLine:
    return RequestLine(number, custom_id, error=LineError(code, f"line {number}: {rule}"))


def _short(value: Any) -> str:
    """A value for a message, by its beginning."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return "absent" if value is None else type(value).__name__
