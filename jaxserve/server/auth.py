"""API keys: one comparison for both fronts, and the HTTP guard that runs before a body is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import error_response

PROBES = frozenset(("/health", "/ready", "/version", "/metrics"))
"""Paths that probes and scrapers reach without a key, unless they are guarded too."""
DISCARD_BYTES, DISCARD_S = 1 << 16, 1.0
"""Most of a refused request's body that is taken in, and how long that may last."""
_TENANT = "jaxserve.tenant"


class KeyRing:
    """The keys of a server; without one it is open.

    Args:
      keys: each with its tenant.
    """

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = [(each.key.encode("utf-8", "surrogateescape"), each.tenant) for each in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def tenant_of(self, header: str | None) -> str:
        """The tenant of an `Authorization` value, "" when its key has none or no key is needed.

        Every key is compared, and each comparison takes the same time whatever was sent.

        Raises:
          ApiError: unauthenticated.
        """
        if not self._keys:
            return ""
        scheme, _, text = (header or "").partition(" ")
        given = text.strip().encode("utf-8", "surrogateescape")
        found = [tenant for key, tenant in self._keys if hmac.compare_digest(given, key)]
        if scheme.lower() != "bearer" or not found:
            message = "the API key is wrong" if header else "an API key is needed; send Authorization: Bearer KEY"
            raise ApiError("unauthenticated", message, code="invalid_api_key")
        return found[0]


def agreed_tenant(asked: str, of_key: str) -> str:
    """The tenant of a request: its key's, which what it asks for must not contradict.

    Raises:
      ApiError: forbidden.
    """
    if of_key and asked and asked != of_key:
        message = f"tenant is {asked[:50]!r}; this API key is of tenant {of_key!r}: leave tenant out"
        raise ApiError("forbidden", message, param="tenant", code="wrong_tenant")
    return of_key or asked


def key_tenant(scope: Scope) -> str:
    """The tenant of the key that an HTTP request was let in with."""
    tenant: str = scope.get(_TENANT, "")
    return tenant


def check_operator(scope: Scope, why: str) -> None:
    """Raises ApiError 403 for the key of a tenant; `why` begins the message."""
    if key_tenant(scope):
        raise ApiError("forbidden", f"{why}; use an API key that has no tenant", code="operator_key_needed")


class ApiKeyGuard:
    """ASGI middleware that refuses requests without a key.

    Args:
      app: the application behind it.
      keys: at least one.
      open_paths: need none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            try:
                tenant = self._keys.tenant_of(None if header is None else header.decode("latin-1"))
            except ApiError as error:
                response = error_response(error)
                if not await _discard_body(receive):
                    response.headers["Connection"] = "close"  # the rest of the body is never read
                await response(scope, receive, send)
                return
            scope = {**scope, _TENANT: tenant}
        await self._app(scope, receive, send)


async def _discard_body(receive: Receive) -> bool:
    """Takes in a body unless it is long or slow; False when some is left.

    A connection that is closed while its body arrives is reset, and the client may never see the answer.
    """
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while more and size <= DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
    return not more
