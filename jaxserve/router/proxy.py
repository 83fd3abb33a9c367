"""One request on its way: to a replica, to another if that one fails it, and its answer back.

    choose ─▶ open ─▶ 429 or 503 ─────────────▶ held; another replica, or passed on
      ▲        │ └──▶ head ─▶ first bytes ─▶ to the client as they come ─▶ end
      └─ lost ─┴──────────────────┘                     └─ lost ─▶ error event

Nothing goes to the client before the first bytes of the answer's body are there, so until then a replica that is lost
is replaced unseen: what it did is thrown away, and generation changes nothing, so it may be done again. Another replica
is tried at most `max_retries` times; only once after a 429 or a loss on an open connection: the request may itself
be what ends replicas; never after silence, which has taken long enough. Any other answer is passed on as it is. Event
streams go through as they come (`event_tail`); other answers are held until they are whole, up to `MAX_HELD_BYTES`.

The client is watched all the while. When it goes away, the connection to the replica is closed, and the replica aborts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.router.event_tail import EventTail
from jaxserve.router.pool import Replica, ReplicaPool, cause
from jaxserve.router.upstream import FAILURES, TextHeaders, Upstream, response_headers
from jaxserve.routing import RouteRequest
from jaxserve.server.disconnects import disconnected
from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import error_response
from jaxserve.server.sse import error_event

log = logging.getLogger("jaxserve.router")

MAX_HELD_BYTES = 1 << 20
"""Longer answers that are no event streams are passed on in pieces."""
OVERLOADED, UNAVAILABLE = 429, 503
_FAULTS = frozenset((500, 502))
"""Statuses that count against the replica; others say something of the request."""
_NOT_SERVING = frozenset(
    ("not_ready", "loading", "warming_up", "draining", "stopped", "engine_dead", "engine_stuck", "dead")
)
"""Codes of a 503 that hold for every request; others hold for the one that was asked."""
RETRY_AFTER_S = 2.0
"""Told where no replica is in rotation, or one was lost."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as replicas get it.

    Attributes:
      target: path and query as they are to stand in the request.
      body: None: it has none.
    """

    method: str
    target: str
    headers: TextHeaders
    body: bytes | None
    route: RouteRequest


@dataclass(frozen=True, slots=True)
class _Held:
    """An answer that is passed on only if no other replica gives a better one.

    Attributes:
      more: further replicas that may be tried after it.
    """

    reason: str
    response: Response
    more: int


class ProxiedResponse(Response):
    """The answer of whichever replica gives one; runs the whole exchange.

    Args:
      active: has this while it runs, so that what is left at the end of draining can be cut short.
    """

    def __init__(
        self, call: Call, pool: ReplicaPool, upstream: Upstream, max_retries: int, active: set[ProxiedResponse]
    ) -> None:
        super().__init__()
        self._call = call
        self._pool = pool
        self._upstream = upstream
        self._max_retries = max_retries
        self._active = active
        self._began = time.perf_counter()
        self._started = self._is_stream = False
        self._exchange: asyncio.Task[None] | None = None
        self._cut: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the exchange as long as the client is there."""
        exchange = self._exchange = asyncio.create_task(self._run(scope, receive, send))
        watcher = asyncio.create_task(disconnected(receive))
        self._active.add(self)
        try:
            await asyncio.wait((exchange, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._active.discard(self)
            gone = not exchange.done()
            watcher.cancel()
            exchange.cancel()
            await asyncio.wait((exchange, watcher))
        if gone:
            watcher.result()
            self._pool.metrics.gone.inc()
        elif exchange.cancelled():
            assert self._cut is not None, "an exchange was cancelled by nobody"
            await self._fail(self._cut, scope, receive, send)
        else:
            exchange.result()

    def cut_short(self, error: ApiError) -> None:
        """Ends the answer with this error now."""
        self._cut = error
        if self._exchange is not None:
            self._exchange.cancel()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: _Held | None = None
        last: _Held | None = None
        tried: list[int] = []
        left = self._max_retries + 1
        while left and (found := self._pool.choose(self._call.route, tried)) is not None:
            if last is not None:
                self._pool.metrics.retries.labels(last.reason).inc()
            replica, _ = found
            last = await self._try(replica, scope, receive, send)
            if last is None:
                return
            tried.append(replica.number)
            left = min(left - 1, last.more)
            if held is None or held.reason != "overloaded":  # a 429 says when to come again
                held = last
        if held is None:
            await self._fail(no_replica(), scope, receive, send)
            return
        if held.reason == "lost":
            self._pool.metrics.refused.labels("replica_lost").inc()
        await held.response(scope, receive, send)

    async def _try(self, replica: Replica, scope: Scope, receive: Receive, send: Send) -> _Held | None:
        """Gives the request to a replica; None once the client has its answer, or as much as there is of it."""
        with self._pool.lent(replica, self._call.route):
            try:
                async with asyncio.timeout(None) as wait:
                    replica.waits.add(wait)
                    async with await self._open(replica) as answer:
                        return await self._relay(replica, answer, wait, send)
            except FAILURES as error:
                self._pool.failed(replica, error)
                lost, more = _lost(replica, error, self._started), self._more_after(error)
            finally:
                replica.waits.discard(wait)
        if not self._started:
            return _Held("lost", error_response(lost), more)
        log.warning("an answer of replica %s broke off: %s", replica.name, cause(lost))
        self._pool.metrics.broken.labels(replica.name).inc()
        await self._fail(lost, scope, receive, send)
        return None

    async def _open(self, replica: Replica) -> aiohttp.ClientResponse:
        call = self._call
        return await self._upstream.open(replica.url + call.target, call.method, call.headers, call.body)

    def _more_after(self, error: BaseException) -> int:
        """Replicas that may be tried after a loss."""
        if isinstance(error, aiohttp.SocketTimeoutError):
            return 0
        unconnected = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return self._max_retries if unconnected else 1

    async def _relay(
        self, replica: Replica, answer: aiohttp.ClientResponse, wait: asyncio.Timeout, send: Send
    ) -> _Held | None:
        self._pool.metrics.requests.labels(replica.name, str(answer.status)).inc()
        if answer.status in (OVERLOADED, UNAVAILABLE):
            body = b"".join([piece async for piece in _pieces(answer)])
            response = _copy(answer, body)
            if answer.status == UNAVAILABLE:
                self._pool.turned_away(replica, for_all=_code(body) in _NOT_SERVING)
                return _Held("unavailable", response, self._max_retries)
            self._pool.answered(replica)
            return _Held("overloaded", response, 1)
        self._is_stream = answer.content_type == "text/event-stream"
        start: Message = {"type": "http.response.start", "status": answer.status, "headers": _headers(answer)}
        async for piece in self._events(answer) if self._is_stream else _pieces(answer):
            if not self._started:
                replica.waits.discard(wait)
                await self._start(replica, answer, start, send)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not self._started:  # an empty body
            await self._start(replica, answer, start, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _start(self, replica: Replica, answer: aiohttp.ClientResponse, start: Message, send: Send) -> None:
        if answer.status in _FAULTS:
            self._pool.failed(replica, RuntimeError(f"it answered {answer.status}"))
        else:
            self._pool.answered(replica)
        self._pool.metrics.first_byte.observe(time.perf_counter() - self._began)
        self._started = True
        self._call = replace(self._call, body=None)  # it is not sent again, and may be large
        await send(start)

    async def _events(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        tail = EventTail()
        async for chunk in answer.content.iter_any():
            if whole := tail.take(chunk):
                yield whole
        if rest := tail.flush():
            yield rest

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tells the client, in whatever way is left."""
        self._pool.metrics.refused.labels(error.code or error.kind).inc()
        if not self._started:
            await error_response(error)(scope, receive, send)
        elif self._is_stream:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": False})
        else:
            # Half of a body that is no stream: all that is left is to close the connection, and uvicorn does so.
            raise ConnectionError(error.message)


def no_replica() -> ApiError:
    """The answer while no replica can be given a request."""
    message = "no replica is in rotation; GET /v1/router/replicas tells why"
    return ApiError("unavailable", message, code="no_replica", retry_after_s=RETRY_AFTER_S)


def _lost(replica: Replica, error: BaseException, started: bool) -> ApiError:
    when = "in the middle of the answer" if started else "before it answered"
    message = f"replica {replica.name} was lost {when}: {cause(error)}"
    return ApiError("unavailable", message, code="replica_lost", retry_after_s=RETRY_AFTER_S)


def _headers(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return response_headers(answer.raw_headers)


def _copy(answer: aiohttp.ClientResponse, body: bytes) -> Response:
    response = Response(body, status_code=answer.status)
    kept = [pair for pair in _headers(answer) if pair[0] != b"content-length"]
    response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
    return response


def _code(body: bytes) -> str | None:
    """`error.code` of an error's body; None where there is none."""
    try:
        code = orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    return code if isinstance(code, str) else None


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body, whole if it is not long, so that a replica lost in the middle of it can be replaced."""
    held: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        held.append(chunk)
        if size > MAX_HELD_BYTES:
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)
