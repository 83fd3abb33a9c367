"""uvicorn's HTTP/1.1 with an end to every wait for a client, and a limit of connections that leaves probes answered.

    connected ──head_timeout_s──▶ head complete ──body_timeout_s──▶ body complete ──▶ answer ──keep-alive──▶ next head

A head counts from the connection or, of a later request, from its first byte; a body from its head, whether anyone
reads it or not. Who is late gets 408 if that can still be said, and the connection ends. Of the connections beyond
`max_connections`, some are answered on the probes' paths and with 503 elsewhere, and end; others end at once.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from dataclasses import dataclass
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from jaxserve.server.auth import PROBES
from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import error_response
from jaxserve.server.strict_h11 import StrictConnection
from jaxserve.server.tls import TlsFiles, uvicorn_options

SPARE_CONNECTIONS = 64
"""Beyond the limit, for probes."""
SPARE_TIMEOUT_S = 2.0
"""For the head of a request on such a connection."""
_FILES_OF_ITS_OWN = 4
"""The part of the process' open files that is not connections', as 1 in so many."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client of HTTP may take.

    Attributes:
      header_timeout_s: seconds for the head of a request.
      body_timeout_s: seconds from the head to the body's end.
      max_connections: 0: as many as the limit of open files lets there be.
      files_per_connection: open files that one connection may lead to.
    """

    header_timeout_s: float = 20.0
    body_timeout_s: float = 120.0
    max_connections: int = 0
    files_per_connection: int = 1

    @property
    def most(self) -> int:
        """Connections that are served."""
        if self.max_connections:
            return self.max_connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            files = 1 << 20
        return max((files - files // _FILES_OF_ITS_OWN) // self.files_per_connection - SPARE_CONNECTIONS, 1)


def http_limits(flags: Any) -> HttpLimits:
    """As the flags of a front have them."""
    return HttpLimits(flags.header_timeout_s, flags.body_timeout_s, flags.max_connections)


def http_config(app: ASGIApp, tls: TlsFiles | None, limits: HttpLimits, **options: Any) -> uvicorn.Config:
    """How HTTP is served.

    By h11 even where httptools is installed, which would be a little faster: h11 bounds a head that is not complete and
    can be told to be strict about framing.

    Args:
      options: more arguments of `uvicorn.Config`.
    """
    http: Any = functools.partial(BoundedProtocol, limits=limits)
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        log_config=None,  # its records go where all others go
        log_level="warning",
        access_log=False,
        **uvicorn_options(tls),
        **options,
    )


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: StrictConnection = StrictConnection()
        self._limits = limits
        self._header_timeout_s = limits.header_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: tuple[str, object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.most
        if beyond > SPARE_CONNECTIONS:
            transport.abort()
            return
        if beyond > 0:
            self.app = _probes_only(self.app)
            self._header_timeout_s = min(SPARE_TIMEOUT_S, self._header_timeout_s)
        self._wait("head", None, self._header_timeout_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what cannot be read as a request, and closes."""
        self._refuse(ApiError("invalid", f"not HTTP as it is served: {self.conn.fault or msg}", code="invalid_http"))

    def _look(self) -> None:
        """Starts the time for what is waited for now, unless it runs."""
        if self.transport.is_closing():
            self._stop_waiting()
        elif self.conn.their_state is h11.SEND_BODY:
            self._wait("body", self.cycle, self._limits.body_timeout_s)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait("head", self.cycle, self._header_timeout_s)
        elif self._waits_for != ("head", None) or self.cycle is not None:
            self._stop_waiting()

    def _wait(self, what: str, after: object, seconds: float) -> None:
        """Args: after: the request before; it and `what` tell one wait from another."""
        if self._waits_for != (what, after):
            self._stop_waiting()
            self._waits_for = (what, after)
            self._timer = self.loop.call_later(seconds, self._late, what, seconds)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._waits_for = None

    def _late(self, what: str, seconds: float) -> None:
        self._timer = None
        if what == "head" and not self.conn.trailing_data[0]:
            self.transport.close()  # it never asked for anything
            return
        self._refuse(
            ApiError("request_timeout", f"the request's {what} did not arrive within {seconds:g} s", code="too_slow")
        )

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection, with an answer if none has begun."""
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing more is sent of its answer
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = orjson.dumps(error.body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            status = error.http_status
            events: tuple[h11.Event, ...] = (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


def _probes_only(app: Any) -> Any:
    """The application of a connection beyond the limit."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES:
            await app(scope, receive, close)
            return
        text = "the server has as many connections as it takes (max_connections); keep and share yours"
        error = ApiError("unavailable", text, code="too_many_connections", retry_after_s=1.0)
        await error_response(error)(scope, receive, close)

    return answer
