"""Server-sent events written by hand: everything that does not change within a stream is built once.

A token's event is a join of ready pieces around one JSON string, which costs a few microseconds; going
through a response model costs a hundred.
"""

from __future__ import annotations

from typing import Any

import orjson

from jaxserve.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
UNFINISHED = b'"finish_reason":null'


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class ChunkWriter:
    """Writes the chunks of one response.

    Args:
      head: the chunk's constant fields (id, object, created, model).
      include_usage: whether chunks carry `"usage": null` and `usage_chunk` will close the stream.
    """

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        constant = orjson.dumps(head)[:-1]
        self._start = b"data: " + constant + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = b"data: " + constant + b',"choices":[],"usage":'
        self.extra_first: bytes = b""
        """JSON members (with a leading comma) for the next chunk's top level; used once."""

    def chunk(
        self,
        index: int,
        payload: bytes,
        finish: bytes = UNFINISHED,
        more: bytes = b"",
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk of one choice.

        Args:
          index: choice number.
          payload: its content member, as `"text":"..."` or `"delta":{...}`.
          finish: its finish members.
          more: further members, each with a leading comma.
          usage: so far, when every chunk tells it.
        """
        end = self._end if usage is None else b'}],"usage":' + orjson.dumps(usage) + b"}\n\n"
        if self.extra_first:
            end = b"}]" + self.extra_first + end[2:]
            self.extra_first = b""
        return b"".join((self._start, b"%d," % index, payload, b",", finish, more, end))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The chunk with empty choices that ends a stream when usage was asked for."""
        return self._usage_start + orjson.dumps(usage) + b"}\n\n"


def finish_members(finish_reason: str | None, stop_reason: str | int | None) -> bytes:
    """The members that end a choice, or say that it goes on."""
    if not finish_reason:
        return UNFINISHED
    reason = orjson.dumps(str(finish_reason))
    return b'"finish_reason":' + reason + b',"stop_reason":' + orjson.dumps(stop_reason)


def member(name: str, value: Any) -> bytes:
    """`,"name":value`."""
    return b',"' + name.encode() + b'":' + orjson.dumps(value)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object; a prompt counts once however many choices it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Usage in the middle of a stream; cached tokens are known at its end."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
