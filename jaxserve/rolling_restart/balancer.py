"""Balancer: a plain TCP balancer for the example. It knows connections, not requests, and asks `/ready` who is there.

It stands for HAProxy, nginx' stream module, a Kubernetes Service or a cloud's network balancer. `jaxserve.router` is
another thing: it reads requests, and is no part of this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 1 << 16
CONNECT_S = 2.0
WAIT_S = 30.0
"""How long a connection waits for a server to be there."""


@dataclass(slots=True)
class Backend:
    """A server as the balancer sees it.

    Attributes:
      host, port: that connections go to.
      ready_port: of its HTTP front, which tells whether it is ready.
      ready: what the last probe found.
    """

    host: str
    port: int
    ready_port: int
    ready: bool = False


class Balancer:
    """Spreads connections over the servers that are ready, in turn; a context.

    Args:
      backends: servers; one may be changed in place while the balancer runs.
      probe_s: between two probes of a server.

    Attributes:
      port: where it listens on 127.0.0.1.
      num_connections: that it has passed on.
    """

    def __init__(self, backends: Sequence[Backend], probe_s: float = 0.2) -> None:
        self._backends, self._probe_s = list(backends), probe_s
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_connections = 0

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        for backend in self._backends:
            self._keep(asyncio.create_task(self._probe(backend)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe(self, backend: Backend) -> None:
        while True:
            backend.ready = await is_ready(backend)
            await asyncio.sleep(self._probe_s)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        try:
            to = await self._connect()
            if to is None:
                return
            self.num_connections += 1
            with contextlib.closing(to[1]):
                await asyncio.gather(_copy(reader, to[1]), _copy(to[0], writer))
        except asyncio.CancelledError:
            return  # asyncio logs a handler that was cancelled as a failure
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the next server that is ready; nothing has been sent, so another may be tried."""
        loop = asyncio.get_running_loop()
        end = loop.time() + WAIT_S
        while loop.time() < end:
            for _ in self._backends:
                backend = self._backends[self._next % len(self._backends)]
                self._next += 1
                if not backend.ready:
                    continue
                try:
                    async with asyncio.timeout(CONNECT_S):
                        return await asyncio.open_connection(backend.host, backend.port)
                except OSError:
                    backend.ready = False
            await asyncio.sleep(0.05)
        return None

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def is_ready(backend: Backend) -> bool:
    """Whether a server's /ready says 200, in time."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(backend.host, backend.ready_port)
            with contextlib.closing(writer):
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
    except OSError:  # TimeoutError too
        return False


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes one way until they end; an end that is seen is passed on."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
