"""LoadClient: sends streaming completions when they are due, and notes when each token came.

An open loop: request i is sent at its own instant on one clock, whatever became of the others; a client that is late
with one is not later with the next. On a small machine the client shares its cores with the server, so it does the
least it can per token: sockets and events are read by hand and no event is parsed but a stream's last ones.

A request's stream: connection of its own, `POST /v1/completions` with token ids, `temperature` 0, `ignore_eos`, and
`stream_options.include_usage`, from which the tokens are counted.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxserve.bench.load.record import COMPLETED, FAILED, REFUSED, Record

REFUSALS = (429, 503)
LEAD_S = 0.05
"""From the start of a run to its first arrival."""
_EMPTY_CHOICES = (b'"choices":[]', b'"choices": []')


@dataclass(frozen=True, slots=True)
class Item:
    """One request to send: `at` seconds after the run's start."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int


class LoadClient:
    """Sends loads to one server.

    Args:
      url: of the server, without `/v1`.
      model: named in requests.
      api_key: sent as bearer token; None: none is.
      timeout_s: after which a request has failed.
      return_token_ids: ask for token ids, so that a token without text is an event too.
    """

    def __init__(
        self, url: str, model: str, *, api_key: str | None, timeout_s: float, return_token_ids: bool = False
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, url
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_s = timeout_s
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if return_token_ids:
            self._fields["return_token_ids"] = True
        head = [
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            "Accept: text/event-stream",
            "Content-Type: application/json",
        ]
        if api_key is not None:
            head.append(f"Authorization: Bearer {api_key}")
        self._head = "\r\n".join(head)

    async def run(self, items: Sequence[Item]) -> list[Record]:
        """Sends all and waits for all ends; their records, in the same order."""
        loop = asyncio.get_running_loop()
        # Built before the clock starts: a long prompt's JSON takes longer than the gap between two arrivals.
        requests = [self._request(item) for item in items]
        start = loop.time() + LEAD_S
        ends = []
        for item, request in zip(items, requests, strict=True):
            record = Record(start + item.at, len(item.prompt), item.max_tokens)
            end: asyncio.Future[Record] = loop.create_future()
            ends.append(end)
            loop.call_at(record.due_at, self._send, request, record, end)
        records = await asyncio.gather(*ends)
        await asyncio.sleep(0)  # a transport closes in the round after
        return list(records)

    def _send(self, request: bytes, record: Record, end: asyncio.Future[Record]) -> None:
        loop = asyncio.get_running_loop()
        stream = _Stream(request, record, end, loop, self._timeout_s)
        context = ssl.create_default_context() if self._tls else None
        connecting = loop.create_task(loop.create_connection(lambda: stream, self._host, self._port, ssl=context))
        connecting.add_done_callback(stream.connected)
        stream.connecting = connecting  # the loop itself holds no task

    def _request(self, item: Item) -> bytes:
        body = json.dumps(self._fields | {"prompt": item.prompt, "max_tokens": item.max_tokens}).encode()
        return f"{self._head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class _Stream(asyncio.Protocol):
    """One request: its bytes out, its events in."""

    def __init__(
        self,
        request: bytes,
        record: Record,
        end: asyncio.Future[Record],
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        self.connecting: asyncio.Task[Any] | None = None
        self._request, self._record, self._end = request, record, end
        self._clock = loop.time
        self._transport: asyncio.WriteTransport | None = None
        self._timer = loop.call_later(timeout_s, self._fail, f"no end within {timeout_s:g} s")
        self._reads_head, self._dechunk = True, _Dechunker()
        self._chunked = False
        self._num_bytes: int | None = None
        self._rest = b""
        self._last_event = self._usage_event = b""

    def connected(self, connecting: asyncio.Task[Any]) -> None:
        """Ends the request where there is no connection."""
        if error := connecting.exception():
            self._fail(f"no connection: {error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        if self._end.done():
            transport.abort()
            return
        self._transport = transport
        transport.write(self._request)
        self._record.sent_at = self._clock()

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._reads_head:
            head, found, data = (self._rest + data).partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            self._rest, self._reads_head = b"", False
            self._read_head(head.decode("latin-1"), now)
        if self._chunked:
            data = self._dechunk(data)
        if self._record.status == 200:
            self._read_events(data, now)
        else:
            self._rest += data
        # Not every server closes the connection when it is asked to.
        if self._dechunk.ended or (self._num_bytes is not None and len(self._rest) >= self._num_bytes):
            self.connection_lost(None)

    def _read_events(self, data: bytes, now: float) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:") and not self._end.done():
                self._event(line, now)

    def connection_lost(self, error: Exception | None) -> None:
        if self._end.done():
            return
        if self._record.status in (0, 200):
            self._fail(f"the connection ended before the stream did: {error or 'closed'}")
            return
        outcome = REFUSED if self._record.status in REFUSALS else FAILED
        self._finish(outcome, f"{self._record.status}: {_message(self._rest)}")

    def _read_head(self, head: str, now: float) -> None:
        first, *lines = head.split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._record.status = int(first.split(" ", 2)[1])
        self._record.ended_at = now
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        if self._record.status != 200 and fields.get("content-length", "").isdigit():
            self._num_bytes = int(fields["content-length"])
        retry_after = fields.get("retry-after", "")
        if retry_after.isdigit():
            self._record.retry_after_s = float(retry_after)

    def _event(self, line: bytes, now: float) -> None:
        if line.startswith(b"data: [DONE]"):
            self._complete()
        elif any(mark in line for mark in _EMPTY_CHOICES):
            self._usage_event = line
        elif b'"choices"' in line:
            self._record.token_at.append(now)
            self._last_event = line
        else:
            self._fail(_message(line.removeprefix(b"data:")))

    def _complete(self) -> None:
        record = self._record
        last = _parsed(self._last_event)
        usage = (_parsed(self._usage_event) or last).get("usage") or {}
        record.num_output = usage.get("completion_tokens") or 0
        if not record.num_output:
            self._fail("the stream had no usage.completion_tokens; it was asked for with stream_options.include_usage")
            return
        # Some servers tell the end in an event of its own, after the last token's.
        choice = (last.get("choices") or [{}])[0]
        if len(record.token_at) > record.num_output and choice.get("finish_reason") and not choice.get("text"):
            record.token_at.pop()
        if not record.token_at:
            self._fail("the stream had no event with a token")
            return
        record.ended_at = record.token_at[-1]
        self._finish(COMPLETED, "")

    def _fail(self, error: str) -> None:
        if self._end.done():
            return
        self._record.ended_at = self._clock()
        self._finish(FAILED, error)

    def _finish(self, outcome: str, error: str) -> None:
        if self._end.done():
            return
        self._timer.cancel()
        self._record.outcome, self._record.error = outcome, error
        self._end.set_result(self._record)
        if self._transport is not None:
            self._transport.abort() if outcome == FAILED else self._transport.close()


class _Dechunker:
    """HTTP chunks in, their contents out; chunks may be cut anywhere.

    Attributes:
      ended: the last chunk was there.
    """

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def __call__(self, data: bytes) -> bytes:
        data = self._rest + data
        contents, at = [], 0
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            contents.append(data[line_end + 2 : end])
            at = end + 2
            if not size:
                self.ended = True
                break
        self._rest = data[at:]
        return b"".join(contents)


def _parsed(event: bytes) -> dict[str, Any]:
    document = json.loads(event.removeprefix(b"data:")) if event else {}
    return document if isinstance(document, dict) else {}


def _message(body: bytes) -> str:
    """An error body's own words, else its beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:200]
