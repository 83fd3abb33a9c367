"""POST /v1/responses, by a server that keeps no responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core import RequestOutput
from jaxserve.server.answering import generate
from jaxserve.server.chat_submit import ChatAnswer, Conversation, submit_chat
from jaxserve.server.description import answers, takes
from jaxserve.server.errors import ApiError, stream_error, unfinished_error
from jaxserve.server.json_body import error_response
from jaxserve.server.response_builder import Event, ResponseBuilder
from jaxserve.server.responses_input import read_input
from jaxserve.server.responses_schema import ResponsesRequest
from jaxserve.server.service import GenerationService
from jaxserve.server.streaming import Answer
from jaxserve.server.tools import parse_tools


def add_response_routes(app: FastAPI, service: GenerationService, max_body_bytes: int) -> None:
    """Adds the routes."""

    body = takes(ResponsesRequest, {"input": "Hello", "max_output_tokens": 8}, ["input"])

    @app.post("/v1/responses", **body, **answers("id", "object", "status", "output", "usage", streams=True))
    async def responses(request: Request) -> Response:
        return await generate(service, max_body_bytes, request, begin_response)

    @app.api_route("/v1/responses/{response}", methods=["GET", "DELETE"], include_in_schema=False)
    @app.get("/v1/responses/{response}/input_items", include_in_schema=False)
    @app.post("/v1/responses/{response}/cancel", include_in_schema=False)
    async def kept_response(request: Request) -> Response:
        name = request.path_params["response"][:128]
        message = f"the response {name!r} does not exist: this server keeps no responses"
        return error_response(ApiError("not_found", message, param="response_id", code="response_not_found"))


async def begin_response(
    service: GenerationService, body: dict[str, Any], headers: Mapping[str, str], tenant: str = ""
) -> Answer:
    """Submits one request; its answer comes from the stream. Raises what `to_api_error` maps.

    `tenant`: of the caller's key, where it has one.
    """
    spec = ResponsesRequest.parse(body)
    service.check_ready(spec.model)
    conversation = Conversation(
        read_input(spec.input, spec.instructions),
        "input",
        variables=spec.chat_template_kwargs,
        tools=parse_tools(spec.tools, spec.tool_choice, spec.parallel_tool_calls, flat=True),
    )
    request_id = spec.request_id or f"resp_{uuid.uuid4().hex}"
    terms = spec.terms(headers, tenant)
    stream, reading = await submit_chat(
        service, spec, conversation, request_id, terms, max_tokens=spec.max_output_tokens
    )
    return _Answer(service, spec, request_id, stream, reading)


class _Answer(ChatAnswer[ResponsesRequest]):
    """Renders one response."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response of a request without `stream`."""
        (output,) = outputs
        (choice,) = output.outputs
        self._check_end(choice.finish_reason)
        builder = ResponseBuilder(self._constant_fields())
        for piece in self._reading.output().feed(choice.text, True):
            for _ in builder.add(piece):
                pass
        usage = _usage(len(output.prompt_token_ids), len(choice.token_ids), output.num_cached_tokens)
        for _ in builder.finish(choice.finish_reason, usage, int(time.time())):
            pass
        return builder.response

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events."""
        builder, reader = ResponseBuilder(self._constant_fields()), self._reading.output()
        for event in builder.begin():
            yield _encoded(event)
        num_tokens = 0
        finish_reason: str | None = None
        try:
            async for delta in self._stream:
                self._check_end(delta.finish_reason)
                num_tokens += len(delta.token_ids)
                finish_reason = delta.finish_reason
                for piece in reader.feed(delta.text, bool(finish_reason)):
                    for event in builder.add(piece):
                        yield _encoded(event)
        except Exception as exc:
            yield _encoded(builder.fail(stream_error(exc, self._engine.state, f"request {self.request_id!r}")))
            return
        usage = _usage(len(self._stream.prompt_token_ids), num_tokens, self._stream.num_cached_tokens)
        for event in builder.finish(finish_reason, usage, int(time.time())):
            yield _encoded(event)

    def _check_end(self, finish_reason: str | None) -> None:
        error = unfinished_error(finish_reason, self._engine.state)
        if error is None and finish_reason == "abort":
            error = ApiError("internal", "the request was aborted", code="aborted")
        if error is not None:
            raise error

    def _constant_fields(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "model": spec.model or self._engine.model_name,
            "background": False,
            "instructions": spec.instructions,
            "max_output_tokens": spec.max_output_tokens,
            "metadata": spec.metadata or {},
            "parallel_tool_calls": spec.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if spec.temperature is None else spec.temperature,
            "text": {"format": spec.format},
            "tool_choice": "auto" if spec.tool_choice is None else spec.tool_choice,
            "tools": spec.tools or [],
            "top_p": 1.0 if spec.top_p is None else spec.top_p,
            "truncation": "disabled",
        }


def _encoded(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
