"""The restart itself: what an operator's script does, server by server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxserve.rolling_restart.balancer import Backend, Balancer
from jaxserve.rolling_restart.clients import Clients
from jaxserve.testing.serving_process import ServingProcess

EXIT_S = 120.0
READY_S = 30.0
"""Most seconds from a server's own word to the balancer's."""
REST_S = 0.5
"""Under load before, between and after restarts."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """What a rolling restart did.

    Attributes:
      clients: with what was served and what failed.
      leave_s: of each server, from the signal to its end.
      start_s: of each, from its start to its first turn.
    """

    clients: Clients
    leave_s: list[float]
    start_s: list[float]


async def rolling_restart(
    start: Callable[[], ServingProcess], servers: list[ServingProcess], count: int, max_tokens: int
) -> Restarted:
    """Restarts every server under the load of `count` clients of each way.

    Args:
      start: starts a server, the new one; it returns when that is ready.
      servers: that run and are ready; holds the new ones afterwards.

    Raises:
      RuntimeError: a server did not end with 0, or does not start.
    """
    http = [_backend(server, urlsplit(server.url).netloc) for server in servers]
    grpc = [_backend(server, server.grpc_address) for server in servers]
    leave_s: list[float] = []
    start_s: list[float] = []
    async with Balancer(http) as http_balancer, Balancer(grpc) as grpc_balancer:
        clients = Clients(f"http://127.0.0.1:{http_balancer.port}", f"127.0.0.1:{grpc_balancer.port}")
        load = asyncio.create_task(clients.run(count, max_tokens))
        await asyncio.sleep(REST_S)
        for index, server in enumerate(servers):
            began = time.monotonic()
            server.signal()
            status = await asyncio.to_thread(server.wait, EXIT_S)
            leave_s.append(time.monotonic() - began)
            if status:
                raise RuntimeError(f"a server ended with {status}: {''.join(server.tail)}")
            server.end()
            began = time.monotonic()
            servers[index] = await asyncio.to_thread(start)
            for backend, address in (
                (http[index], urlsplit(servers[index].url).netloc),
                (grpc[index], servers[index].grpc_address),
            ):
                fresh = _backend(servers[index], address)
                backend.host, backend.port, backend.ready_port = fresh.host, fresh.port, fresh.ready_port
            await _until_ready([http[index], grpc[index]])
            start_s.append(time.monotonic() - began)
            await asyncio.sleep(REST_S)
        clients.stop()
        await load
    return Restarted(clients, leave_s, start_s)


def _backend(server: ServingProcess, address: str) -> Backend:
    host, _, port = address.rpartition(":")
    ready_port = urlsplit(server.url).port
    assert ready_port is not None
    return Backend(host, int(port), ready_port)


async def _until_ready(backends: Sequence[Backend]) -> None:
    """Raises TimeoutError when the balancer does not find all of them ready, though they said that they are."""
    async with asyncio.timeout(READY_S):
        while not all(backend.ready for backend in backends):
            await asyncio.sleep(0.05)
