"""API keys: one comparison for both fronts, and the HTTP guard that runs before a body is read."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import error_response

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics"))
"""Paths that probes and scrapers reach without a key; everything else needs it."""


def check_authorization(header: str | None, api_key: str) -> None:
    """Checks an `Authorization` value, taking the same time whatever it holds.

    Raises:
      ApiError: unauthenticated.
    """
    scheme, _, given = (header or "").partition(" ")
    matches = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), api_key.encode())
    if scheme.lower() != "bearer" or not matches:
        message = "the API key is wrong" if header else "an API key is needed; send Authorization: Bearer KEY"
        raise ApiError("unauthenticated", message, code="invalid_api_key")


class ApiKeyGuard:
    """ASGI middleware that refuses requests without the key.

    Args:
      app: the application behind it.
      api_key: the key.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            try:
                check_authorization(None if header is None else header.decode("latin-1"), self._api_key)
            except ApiError as error:
                response = error_response(error)
                response.headers["Connection"] = "close"  # the body is never read
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
