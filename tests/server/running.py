"""Servers in a thread, for tests that need real sockets; and how tests talk to them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn

from jaxserve.server.bounded_http import HttpLimits, http_config
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.grpc_service import GrpcServer
from jaxserve.server.http_app import build_app
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings
from jaxserve.server.tls import TlsFiles


class RunningServer:
    """Both fronts over `make_engine()`, on free ports.

    Args:
      make_engine: called on the server's event loop.

    Attributes:
      engine: what it made; service: of both fronts.
      url, grpc_address: where.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineApi],
        settings: HttpSettings | None = None,
        tls: TlsFiles | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._settings = settings or HttpSettings()
        self._tls = tls
        self._limits = limits or HttpLimits()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the test server did not start"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine: Any = self._make_engine()
        service = self.service = GenerationService(self.engine)
        app = build_app(self.engine, self._settings, service)
        self._server = uvicorn.Server(http_config(app, self._tls, self._limits, timeout_graceful_shutdown=2))
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        grpc_server = GrpcServer(service, "127.0.0.1", 0, self._settings, self._tls)
        self.grpc_address = f"127.0.0.1:{grpc_server.port}"
        await grpc_server.start()
        await until_async(lambda: self._server.started)
        self._started.set()
        await serving
        await grpc_server.stop(0)

    def call[T](self, function: Callable[[], T]) -> T:
        """Runs `function` on the server's loop, for objects that are not thread-safe."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def stop(self) -> None:
        """Ends the fronts."""
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive(), "the test server did not stop"

    def client(self) -> httpx.Client:
        """A client of this server."""
        return httpx.Client(base_url=self.url, timeout=30)


def until(condition: Callable[[], bool], seconds: float = 10.0, what: str = "condition") -> None:
    """Waits for a condition; fails when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.002)


async def until_async(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def events_of(body: str) -> list[Any]:
    """The events of a whole stream: parsed JSON, and the string "[DONE]"."""
    events = []
    for block in body.split("\n\n"):
        if block:
            assert block.startswith("data: ") and "\n" not in block, f"not one data line: {block!r}"
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else strict_json(data))
    return events


def choice_texts(events: list[Any]) -> dict[int, str]:
    """The joined text per choice of a stream's events, completions or chat."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def strict_json(text: str) -> Any:
    """Parses JSON, refusing NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:300]}"
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    """An HTTP request's bytes, for tests that handle the socket themselves."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    return head.encode() + b"\r\n" + payload


def read_until(connection: socket.socket, count: int, mark: bytes = b"data: ") -> bytes:
    """Reads until `mark` was seen `count` times."""
    connection.settimeout(20)
    data = b""
    while data.count(mark) < count:
        chunk = connection.recv(4096)
        assert chunk, f"closed after {data!r}"
        data += chunk
    return data


def metric_samples(text: str) -> Iterator[tuple[str, float]]:
    """Name (with labels) and value of each line of /metrics."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)
