"""How a route answers: body in, handler or generation, errors out by the map of `errors`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.auth import key_tenant
from jaxserve.server.errors import stream_error, to_api_error
from jaxserve.server.field_checks import REQUEST_ID
from jaxserve.server.json_body import JsonResponse, error_response, read_json
from jaxserve.server.refusals import counting_refusals, num_choices_of
from jaxserve.server.service import GenerationService
from jaxserve.server.streaming import ID_HEADER, Answer, ClientGoneError, respond

Begin = Callable[[GenerationService, dict[str, Any], Mapping[str, str], str], Awaitable[Answer]]
"""Submits a request: of the service, the body, the headers and the key's tenant."""
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


async def generate(service: GenerationService, max_body_bytes: int, request: Request, begin: Begin) -> Response:
    """The answer of what `begin` submits, or the error that it comes to; with the request's id once it is known."""
    what, request_id = f"{request.method} {request.url.path}", None
    try:
        body = await read_json(request, max_body_bytes)
        asked = body.get("request_id")
        if isinstance(asked, str) and REQUEST_ID.fullmatch(asked):
            request_id = asked
            what = f"{what}, request {request_id!r}"
        with counting_refusals(service.engine, num_choices_of(body), what):
            service.check_ready()
            begun = await begin(service, body, request.headers, key_tenant(request.scope))
        request_id = begun.request_id
        return await respond(request, begun)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    except Exception as exc:
        response = error_response(stream_error(exc, service.engine.state, what))
        if request_id is not None:
            response.headers[ID_HEADER] = request_id
        return response


def answer_with(content: Callable[[], Any]) -> Response:
    """`content()` as JSON, or the error it raises; for routes without a body."""
    try:
        return JsonResponse(content())
    except Exception as exc:
        return error_response(to_api_error(exc))
