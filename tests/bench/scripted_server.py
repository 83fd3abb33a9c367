"""A server of completions whose every answer and delay is written down beforehand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """What one request gets.

    Attributes:
      status: of the answer; not 200: `body` follows and nothing else.
      first_s, gap_s: before the first token and between tokens.
      events: data of the stream's events, `[DONE]` included; None: a token each, then usage and `[DONE]`.
      piece: bytes written at once, to cut chunks and events anywhere; None: an event at once.
      newline: of the stream's lines.
      keep_open: the connection stays open until the client closes it.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0
    events: list[str] | None = None
    piece: int | None = None
    newline: str = "\n"
    keep_open: bool = False


def token(text: str = "x", finish: str | None = None) -> str:
    """The data of a token's event."""
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def usage(count: int) -> str:
    """The data of the event that counts tokens."""
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})


class ScriptedServer:
    """Listens on a free port from entering to leaving, in a thread of its own.

    Args:
      script_of: given a request's number in order of arrival, and its body.

    Attributes:
      arrived_at: instants (time.monotonic) at which requests were read.
      bodies: theirs.
    """

    def __init__(self, script_of: Callable[[int, dict[str, Any]], Script]) -> None:
        self._script_of = script_of
        self.arrived_at: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []

    def __enter__(self) -> ScriptedServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: Any) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in a later round

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
        if head.startswith("GET"):
            script = Script(404)
        else:
            self.arrived_at.append(time.monotonic())
            self.bodies.append(body)
            self.heads.append(head)
            script = self._script_of(len(self.bodies) - 1, body)
        try:
            await _write(writer, script, body.get("max_tokens", 0))
            if script.keep_open:
                await reader.read()
        except ConnectionError:
            pass  # the client has left, as it may
        finally:
            writer.close()


async def _write(writer: asyncio.StreamWriter, script: Script, max_tokens: int) -> None:
    head = f"HTTP/1.1 {script.status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in script.headers.items())
    if script.status != 200:
        writer.write(f"{head}Content-Length: {len(script.body)}\r\n\r\n{script.body}".encode())
        await writer.drain()
        return
    writer.write(f"{head}Transfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n".encode())
    events = script.events
    if events is None:
        events = [token() for _ in range(max_tokens)] + [usage(max_tokens), "[DONE]"]
    for number, event in enumerate(events):
        await asyncio.sleep(script.gap_s if number and '"text"' in event else 0.0 if number else script.first_s)
        data = f"data: {event}{script.newline * 2}".encode()
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        size = script.piece or len(chunk)
        for at in range(0, len(chunk), size):
            writer.write(chunk[at : at + size])
            await writer.drain()
            if script.piece:
                await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
