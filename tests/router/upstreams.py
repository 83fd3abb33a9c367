"""Scripted replicas and a router before them, in threads, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import httpx

from jaxserve.router.app import RouterApp
from jaxserve.router.health import HealthChecker
from jaxserve.router.launcher import router_config
from jaxserve.router.metrics import RouterMetrics
from jaxserve.router.pool import ReplicaPool
from jaxserve.router.settings import HealthSettings, RouterSettings
from jaxserve.router.upstream import Upstream
from jaxserve.server.bounded_http import HttpLimits
from jaxserve.server.listening import HttpServer
from tests.server.running import metric_samples, until, until_async

Script = Callable[["Exchange"], Awaitable[None]]
EVENT = b'data: {"choices":[{"index":0,"text":" sea"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Exchange:
    """One request at a scripted replica."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def path(self) -> str:
        return self.head.split(b" ")[1].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def begin_stream(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n" % len(data) + data + b"\r\n")

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Ends the connection as a killed process does."""
        self.writer.transport.abort()


class ScriptedReplica:
    """Answers probes as a ready replica and everything else by its script.

    Attributes:
      script: set it before a request.
      seen: the requests, probes left out.
      ready: what /ready says; hangs: it says nothing.
      models, load: what it tells; lists: the status of its list of models.
      gone: clients that closed their connection while the script waited with `until_gone`.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or self.stream
        self.seen: list[Exchange] = []
        self.ready, self.models, self.load = True, ["m"], 0
        self.hangs = False
        self.lists = "200 OK"
        self.gone = threading.Event()
        self._open: set[asyncio.StreamWriter] = set()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.name = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.name}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.listen()

    def listen(self) -> None:
        """Takes connections, on the same port each time."""

        async def start() -> asyncio.Server:
            return await asyncio.start_server(self._serve, "127.0.0.1", self.port)

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def die(self) -> None:
        """Refuses connections and resets those that are open."""

        async def close() -> None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)

    def stop(self) -> None:
        """Ends its thread."""
        self.die()

        async def cancel_rest() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_rest(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def stream(self, exchange: Exchange) -> None:
        """The usual script: three events."""
        await exchange.begin_stream("X-Request-Id: cmpl-1")
        for _ in range(3):
            await exchange.chunk(EVENT)
        await exchange.chunk(DONE)
        await exchange.end_stream()

    async def until_gone(self, exchange: Exchange) -> None:
        """Waits until the router has closed its connection."""
        await exchange.reader.read()
        self.gone.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                exchange = Exchange(head, b"", writer, reader)
                if length := exchange.header("content-length"):
                    exchange.body = await reader.readexactly(int(length))
                await self._answer(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/ready":
            while self.hangs:
                await asyncio.sleep(0.05)
            status = "200 OK" if self.ready else "503 Service Unavailable"
            await exchange.answer(b'{"state": "%s"}' % (b"ready" if self.ready else b"warming up"), status)
        elif exchange.path.startswith("/v1/models") and self.lists != "200 OK":
            await exchange.answer(b'{"error": {"message": "no"}}', self.lists)
        elif exchange.path == "/v1/models":
            cards = ",".join(f'{{"id": "{name}", "object": "model"}}' for name in self.models)
            await exchange.answer(f'{{"object": "list", "data": [{cards}]}}'.encode())
        elif exchange.path == "/load":
            await exchange.answer(b'{"server_load": %d, "num_requests_running": %d}' % (self.load, self.load))
        else:
            self.seen.append(exchange)
            await self.script(exchange)


@dataclass
class RunningRouter:
    """A router before these replicas, in a thread.

    Attributes:
      url: where.
      pool, app: of it; touch them by `call`.
    """

    replicas: list[str]
    settings: RouterSettings = field(default_factory=RouterSettings)
    limits: HttpLimits = field(default_factory=HttpLimits)

    def __post_init__(self) -> None:
        if self.settings.health == HealthSettings():
            self.settings = replace(self.settings, health=HealthSettings(interval_s=0.05, timeout_s=2.0))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the router did not start"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics = RouterMetrics()
        self.pool = ReplicaPool(self.replicas, self.settings, self.metrics)
        async with Upstream(self.settings.proxy) as upstream:
            self.app = RouterApp(self.pool, upstream, self.settings)
            self._server = HttpServer(router_config(self.app.asgi, limits=self.limits))
            probing = asyncio.create_task(HealthChecker(self.pool, upstream, self.settings.health).run())
            serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            await until_async(lambda: self._server.started)
            self._started.set()
            await serving
            probing.cancel()
            await asyncio.wait([probing])

    def call[T](self, function: Callable[[], T]) -> T:
        """Runs `function` on the router's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def until_up(self, count: int) -> None:
        """Waits until so many replicas are in rotation."""
        until(lambda: len(self.call(lambda: self.pool.in_rotation)) == count, 10, f"{count} replicas in rotation")

    def client(self) -> httpx.Client:
        """A client of it."""
        return httpx.Client(base_url=self.url, timeout=30)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one of its metrics, 0 where it has none."""
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"jaxserve:router_{name}" + (f"{{{shown}}}" if shown else "")
        with self.client() as client:
            return dict(metric_samples(client.get("/metrics").text)).get(wanted, 0.0)

    def stop(self) -> None:
        """Ends it."""
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive(), "the router did not stop"
