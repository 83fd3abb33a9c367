"""Waiting on engine streams while watching the client: event streams, whole answers, merged streams.

An `Answer` is what the generation routes make of a request; `respond` sends it over HTTP, and a batch job, which has
no client to watch, collects and renders it itself.

A client that goes away (FIN, half-close or RST) shows as `http.disconnect`; then every choice of its
request is aborted, at once and whether or not anything was being sent. A slow reader blocks `send`, so
nothing is queued here for it: the engine merges the deltas it has not taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core import RequestOutput
from jaxserve.server.disconnects import disconnected
from jaxserve.server.engine_api import Delta, StreamApi
from jaxserve.server.json_body import JsonResponse
from jaxserve.server.service import cancel_all

log = logging.getLogger("jaxserve.server")

ID_HEADER = "X-Request-Id"


class Answer(Protocol):
    """A submitted request, and how its outputs are rendered.

    Attributes:
      request_id: the client's, or drawn.
      streams: one per prompt.
      is_stream: the client asked for server-sent events.
    """

    request_id: str
    streams: Sequence[StreamApi]
    is_stream: bool

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response's body, of one output per stream; raises `ApiError` when one is no completion."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """The server-sent events, read from the streams."""
        ...


class ClientGoneError(Exception):
    """The client closed its connection before the answer was there."""


class EventStreamResponse(Response):
    """Sends ready-made server-sent events and aborts `streams` when the client goes away.

    Args:
      events: yields whole events, as `data: {...}\\n\\n`.
      streams: what the events are made from; cancelled in every case at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], streams: Sequence[StreamApi], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | (headers or {}))
        del self.headers["content-length"]
        self._events = events
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        sender = asyncio.create_task(self._send_all(send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancel_all(self._streams)
            watcher.cancel()
            sent_all = sender.done()
            sender.cancel()
            await asyncio.wait((sender, watcher))
        (sender if sent_all else watcher).result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond(request: Request, answer: Answer) -> Response:
    """The HTTP response, once it can begin; raises what `collect_all` and `Answer.whole` raise."""
    headers = {ID_HEADER: answer.request_id}
    if answer.is_stream:
        return EventStreamResponse(answer.events(), answer.streams, headers)
    return JsonResponse(answer.whole(await collect_all(request, answer.streams)), headers=headers)


async def collect(streams: Sequence[StreamApi]) -> list[RequestOutput]:
    """The whole outputs, in order.

    Raises:
      EngineDeadError, RequestFailedError: of the first that failed, after aborting the others.
    """
    try:
        return await asyncio.gather(*(stream.collect() for stream in streams))
    finally:
        cancel_all(streams)


async def collect_all(request: Request, streams: Sequence[StreamApi]) -> list[RequestOutput]:
    """The whole outputs, in order, as long as the client is there.

    Raises:
      ClientGoneError: after aborting all.
      EngineDeadError, RequestFailedError: of the first that failed, after aborting the others.
    """
    work = asyncio.create_task(collect(streams))
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        watcher.result()
        raise ClientGoneError
    finally:
        cancel_all(streams)
        watcher.cancel()
        work.cancel()
        await asyncio.wait((work, watcher))


async def merge(streams: Sequence[StreamApi]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of several prompts as they come, each with its prompt's number.

    At most one delta per prompt waits here, so a slow reader holds back the streams themselves.
    """
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: StreamApi) -> None:
        try:
            async for delta in stream:
                await queue.put((index, delta))
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
