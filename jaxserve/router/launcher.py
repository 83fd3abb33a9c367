"""Runs the router in one event loop, from binding its port to the last byte.

    bind ─▶ serve (503) ─▶ a replica is ready ─▶ SIGTERM or SIGINT ─▶ drain ─▶ front ends ─▶ children end

On the first signal new requests get 503 and open ones may finish within the grace period; what is left then ends with
an error frame. Children are asked to end after that. A second signal ends all at once. If every child is given up, or
serving or probing fails, the router ends with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import uvicorn
from starlette.types import ASGIApp

from jaxserve.router.app import RouterApp
from jaxserve.router.children import KILL_AFTER_S, Children, ChildSettings
from jaxserve.router.health import HealthChecker
from jaxserve.router.metrics import RouterMetrics
from jaxserve.router.pool import ReplicaPool
from jaxserve.router.settings import RouterSettings
from jaxserve.router.upstream import Upstream
from jaxserve.server.bounded_http import HttpLimits, http_config
from jaxserve.server.errors import ApiError
from jaxserve.server.listening import HttpServer, address, bind, raise_open_files_limit
from jaxserve.server.tls import TlsFiles

log = logging.getLogger("jaxserve.router")

FLUSH_S = 5.0
"""Time for the last bytes of answers to leave after draining."""
_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Where and how to serve.

    Attributes:
      host, http_port: 0 picks a free port.
      drain_grace_s: seconds that open requests get after the first signal.
      tls: None: plain text.
      limits: of connections and slow clients.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    drain_grace_s: float = 30.0
    tls: TlsFiles | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)


class RouterLauncher:
    """One router process.

    Args:
      replicas: URLs of running servers, or how to start some.
    """

    def __init__(
        self, front: FrontSettings, settings: RouterSettings, replicas: tuple[str, ...] | ChildSettings
    ) -> None:
        self._front = front
        self._settings = settings
        self._metrics = RouterMetrics()
        self._children: Children | None = None
        if isinstance(replicas, ChildSettings):
            self._children = Children(replicas, self._child_ended, lambda number: self._pool.replicas[number].up_since)
            replicas = self._children.urls
        self._pool = ReplicaPool(replicas, settings, self._metrics)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal.

        Returns:
          The process's exit status.
        """
        front = self._front
        try:
            listening = bind(front.host, front.http_port)
        except OSError as error:
            _note(f"jaxserve: {error}")
            return 1
        raise_open_files_limit()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        async with Upstream(self._settings.proxy) as upstream:
            app = RouterApp(self._pool, upstream, self._settings)
            server = HttpServer(router_config(app.asgi, front.tls, front.limits))
            serving = asyncio.create_task(server.serve([listening]))
            probing = asyncio.create_task(HealthChecker(self._pool, upstream, self._settings.health).run())
            living = asyncio.create_task(self._keep_children())
            host_port = address(front.host, listening.getsockname()[1])
            tasks = (serving, probing, living)
            await self._announce(host_port, tasks)
            await self._until_stopped(tasks)
            status = 1 if any(task.done() for task in tasks) else 0
            await self._drain(app)
            server.should_exit = True
            await _told(serving)
            probing.cancel()
            await _told(probing)
        if self._children is not None:
            await self._children.stop(front.drain_grace_s + KILL_AFTER_S)
        living.cancel()
        await _told(living)
        return status

    async def _keep_children(self) -> None:
        if self._children is None:
            await asyncio.Event().wait()
        else:
            await self._children.run()
            if not self._stop.is_set():
                _note("jaxserve: every replica is given up; set --max_restarts, or see their logs above")

    async def _announce(self, host_port: str, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Waits for a replica, then says where the router is."""
        scheme = "http" if self._front.tls is None else "https"
        _note(f"router at {scheme}://{host_port} before {len(self._pool.replicas)} replicas; it waits for the first")
        while not self._pool.in_rotation:
            if self._stop.is_set() or any(task.done() for task in tasks):
                return
            await asyncio.sleep(_PERIOD_S)
        print(f"jaxserve router ready http={host_port}", flush=True)

    async def _until_stopped(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Until a signal, or the end of one of the tasks that are to run as long as the router."""
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _drain(self, app: RouterApp) -> None:
        self._pool.draining = True
        grace_s = self._front.drain_grace_s
        if app.active:
            _note(f"stopping: open requests have {grace_s:g} s; a second signal ends now")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while app.active:
                    await asyncio.sleep(_PERIOD_S)
        if app.active:
            _note("stopping: the grace period is over; what was left has been cut short")
        message = "the router shut down before the request finished"
        for answer in tuple(app.active):
            answer.cut_short(ApiError("unavailable", message, code="draining", retry_after_s=5.0))

    def _child_ended(self, number: int, how: str, again: bool) -> None:
        replica = self._pool.replicas[number]
        self._pool.unready(replica, f"its process ended with {how}")
        replica.up_since = None
        if again:
            self._metrics.restarts.labels(replica.name).inc()

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            if self._children is not None:
                self._children.kill()
            os._exit(128 + number)
        self._stop.set()


def router_config(app: ASGIApp, tls: TlsFiles | None = None, limits: HttpLimits | None = None) -> uvicorn.Config:
    """How the router's HTTP is served; a client's connection may lead to one to a replica."""
    limits = replace(limits or HttpLimits(), files_per_connection=2)
    return http_config(app, tls, limits, lifespan="off", timeout_graceful_shutdown=round(FLUSH_S))


async def _told(task: asyncio.Task[None]) -> None:
    """Waits for a task that ends; tells what it raised."""
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the router ends", exc_info=error)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
