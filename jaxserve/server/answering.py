"""How a route answers: body in, handler, errors out by the map of `errors`; and how it is described at /docs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.errors import to_api_error
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
        return error_response(to_api_error(exc))


def answer_with(content: Callable[[], Any]) -> Response:
    """`content()` as JSON, or the error it raises; for routes without a body."""
    try:
        return JsonResponse(content())
    except Exception as exc:
        return error_response(to_api_error(exc))


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that is parsed by hand."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    for name, field in schema.get("properties", {}).items():
        # Nested definitions are written in place: the document has no component of that name.
        text = str(field)
        if "$ref" in text:
            schema["properties"][name] = next(iter(definitions.values()), {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
