"""Which names a server answers to: a guard against DNS rebinding.

A web page may point a name of its own at 127.0.0.1, and then reads answers of a server there as if they were its own
site's. What gives it away is the Host header, which has that name. Addresses are no names, so they are always let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import error_response

LOOPBACK_NAMES = ("localhost",)


def answered_hosts(allowed: Sequence[str], host: str, has_keys: bool) -> tuple[str, ...]:
    """The names to answer to; none: all.

    Args:
      allowed: what the operator said; none: names of the loopback where no key keeps a page out, all elsewhere.
      host: that is listened on.
      has_keys: requests need one.
    """
    if "*" in allowed:
        return ()
    if allowed:
        return (*allowed, *LOOPBACK_NAMES)
    return LOOPBACK_NAMES if _is_loopback(host) and not has_keys else ()


class HostGuard:
    """ASGI middleware that refuses requests for other names.

    Args:
      app: the application behind it.
      names: to answer to, and names below each.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = tuple(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 403."""
        if scope["type"] == "http":
            for header in [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]:
                if not self._answers(_name_of(header)):
                    message = f"this server does not answer to the host {header[:100]!r}; start it with --allowed_hosts"
                    response = error_response(ApiError("forbidden", message, code="host_not_allowed"))
                    response.headers["Connection"] = "close"  # the rest of the body is never read
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _answers(self, name: str) -> bool:
        return not name or _is_address(name) or any(name == own or name.endswith(f".{own}") for own in self._names)


def _name_of(header: str) -> str:
    """The host of a Host header, without the port, brackets and a final dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().removesuffix(".")


def _is_loopback(host: str) -> bool:
    return host in LOOPBACK_NAMES or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
