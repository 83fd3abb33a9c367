"""ResponseBuilder: an output, piece by piece, as a response object of /v1/responses and the events that tell it.

    response.created, response.in_progress
      per message:  response.output_item.added, response.content_part.added, response.output_text.delta ...,
                    response.output_text.done, response.content_part.done, response.output_item.done
      per call:     response.output_item.added, response.function_call_arguments.delta ...,
                    response.function_call_arguments.done, response.output_item.done
    response.completed, response.incomplete or response.failed

The response of a request that is not streamed is what the last event holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.server.output_reader import CallArguments, CallStart, Content, Piece

type Event = dict[str, Any]

_ERROR_CODES = {"overloaded": "rate_limit_exceeded", "invalid": "invalid_prompt"}
"""OpenAI's words for kinds of `ApiError`; a response knows no others that fit."""


class ResponseBuilder:
    """Puts one response together.

    Args:
      response: its constant fields.

    Attributes:
      response: as far as it is known.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response | {
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        self._output: list[dict[str, Any]] = self.response["output"]
        self._open: dict[str, Any] | None = None
        self._num_events = 0

    def begin(self) -> Iterator[Event]:
        """The events before any output."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, piece: Piece) -> Iterator[Event]:
        """The events of a piece."""
        match piece:
            case Content(text=text):
                if self._open is None or self._open["type"] != "message":
                    yield from self._close("completed")
                    yield from self._open_message()
                part = self._item["content"][0]
                part["text"] += text
                yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])
            case CallStart():
                yield from self._close("completed")
                call = {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""}
                yield from self._open_item({"id": _fresh("fc"), **call, "status": "in_progress"})
            case CallArguments(text=text):
                self._item["arguments"] += text
                yield self._item_event("response.function_call_arguments.delta", delta=text)

    def finish(self, finish_reason: str | None, usage: dict[str, Any], now: int) -> Iterator[Event]:
        """The events of the end.

        Args:
          finish_reason: "length" leaves the response incomplete.
          now: seconds since 1970.
        """
        status = "incomplete" if finish_reason == "length" else "completed"
        yield from self._close(status)
        self.response |= {"status": status, "usage": usage}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = now
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, error: ApiError) -> Event:
        """The event of an end that is a fault."""
        code = _ERROR_CODES.get(error.kind, "server_error")
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=self.response)

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None, "an item is open"
        return self._open

    def _open_message(self) -> Iterator[Event]:
        message: dict[str, Any] = {"id": _fresh("msg"), "type": "message", "role": "assistant", "content": []}
        yield from self._open_item(message | {"status": "in_progress"})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item["content"].append(part)
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _open_item(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = item
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        item["status"] = status
        self._open = None
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _item_event(self, kind: str, **members: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output) - 1, **members)

    def _event(self, kind: str, **members: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return event


def _fresh(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
