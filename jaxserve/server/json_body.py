"""Request bodies: read under a limit, parsed as strict JSON.

Strict means what RFC 8259 says and no more: no NaN or Infinity, no number past a double's range, valid
UTF-8, no lone surrogates, at most 1024 levels deep. orjson refuses all of these.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.server.errors import ApiError


class JsonResponse(Response):
    """A response that holds strict JSON (orjson writes NaN as null)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)


def error_response(error: ApiError) -> JsonResponse:
    """An error as its HTTP answer."""
    headers = error.headers()
    if error.kind == "too_large":
        headers["Connection"] = "close"  # the rest of the body is never read
    return JsonResponse(error.body(), status_code=error.http_status, headers=headers)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object.

    Args:
      limit: most bytes of a body; refused while reading, before more is held.

    Raises:
      ApiError: 400, 413 or 415. A body that comes too slowly is `bounded_http`'s to end.
    """
    body = await read_body(request, limit)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ApiError("invalid", f"the request body is not valid JSON: {exc}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", f"the request body must be a JSON object; got {_json_type(value)}")
    return value


async def read_body(request: Request, limit: int) -> bytes:
    """The bytes of a body that says it is JSON.

    Args:
      limit: most bytes of a body; refused while reading, before more is held.

    Raises:
      ApiError: 400, 413 or 415. A body that comes too slowly is `bounded_http`'s to end.
    """
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Other types are what a foreign web page can post without asking the browser for permission.
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError("unsupported_media", f"content type is {media[:100]!r}; send application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("unsupported_media", "compressed request bodies are not supported; send the JSON as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit, f"{int(declared)} bytes")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit, "more")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError("invalid", "the client went away while sending its request") from None
    return b"".join(chunks)


def _too_large(limit: int, seen: str) -> ApiError:
    message = f"the request body has {seen}; the limit is {limit} bytes (max_body_bytes)"
    return ApiError("too_large", message, code="body_too_large")


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
