"""How a route answers: body in, handler, errors out by the map of `errors`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.errors import stream_error, to_api_error
from jaxserve.server.json_body import JsonResponse, error_response, read_json
from jaxserve.server.service import GenerationService
from jaxserve.server.streaming import ClientGoneError

Handler = Callable[[GenerationService, Request, dict[str, Any]], Awaitable[Response]]


async def answer(service: GenerationService, max_body_bytes: int, request: Request, handler: Handler) -> Response:
    """What `handler` makes of the request's JSON body, or the error it raises."""
    try:
        body = await read_json(request, max_body_bytes)
        service.check_ready()
        return await handler(service, request, body)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    except Exception as exc:
        return error_response(stream_error(exc, service.engine.state))


def answer_with(content: Callable[[], Any]) -> Response:
    """`content()` as JSON, or the error it raises; for routes without a body."""
    try:
        return JsonResponse(content())
    except Exception as exc:
        return error_response(to_api_error(exc))
