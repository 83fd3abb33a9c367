"""HEAD wherever there is GET: balancers and monitors ask /health so."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that has HEAD answered as GET; the HTTP server, which knows what was asked, sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
