"""Errors of the HTTP framework in the form that all others have."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.json_body import error_response


async def http_exception(request: Request, exc: Exception) -> Response:
    """No such path, no such method on it, or a request that the framework refuses."""
    assert isinstance(exc, HTTPException), f"handler is for HTTPException, got {type(exc)}"
    path = request.scope["path"][:200]
    if exc.status_code == 404:
        return error_response(ApiError("not_found", f"there is no path {path!r}", code="path_not_found"))
    if exc.status_code != 405:
        return error_response(ApiError("invalid", str(exc.detail)))
    allowed = (exc.headers or {}).get("Allow", "")
    message = f"{request.method} is not allowed on {path!r}; use {allowed}"
    response = error_response(ApiError("method_not_allowed", message, code="method_not_allowed"))
    response.headers["Allow"] = allowed
    return response


async def unexpected(_: Request, exc: Exception) -> Response:
    """A fault of ours."""
    return error_response(to_api_error(exc))
