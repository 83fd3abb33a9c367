"""Runs an engine behind both fronts in one event loop, from binding the ports to the last byte.

    bind -> serve (503 with progress) -> ready -> SIGTERM or SIGINT -> leave -> drain -> fronts end -> engine ends

The ports are bound first, so a port in use is known before a model is loaded. With a drain delay, the first signal
turns `/ready` to 503 and has answers close their connections, while requests are still taken: until the delay is over,
for balancers to see it, and until the connections from before are closed, since a client that keeps one has not been
told.
Then, or at once, new requests get 503 and open ones may finish within the grace period; what is left ends with an error
frame. A stuck engine has failed them, so the process ends then, with 1. A second signal ends it at once. An HTTP server
that ends by itself, which it never should, is as a signal, but that the process ends with 1. An engine that dies while
it starts ends the process with 1. One that dies later fails what is open; for `DEATH_S` more every probe says so, then
the process ends with 1, unless it is told to stay (`exit_on_death`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER
from jaxserve.server.bounded_http import HttpLimits, http_config
from jaxserve.server.console import StartupDisplay
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.grpc_service import GrpcServer
from jaxserve.server.http_app import build_app
from jaxserve.server.listening import HttpServer, address, bind, raise_open_files_limit
from jaxserve.server.process import flush_and_exit, wait_until_ready
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings
from jaxserve.server.start_errors import start_error
from jaxserve.server.tls import TlsFiles

if TYPE_CHECKING:  # they load jax
    from jaxserve.disaggregation import PrefillServer, RemotePrefill
    from jaxserve.engine import AsyncEngine

log = logging.getLogger("jaxserve.server")

LEAVE_PERIOD_S = 0.1
FLUSH_S = 5.0
"""Time for the last bytes of answers to leave after the engine has drained."""
DEATH_S = 1.0
"""Time in which a server whose engine has died still answers: with errors, and with 503 to probes."""
LAST_EXIT_S = DEATH_S + FLUSH_S + 3.0
"""After an engine's death the process ends by then, whatever its event loop and threads do."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and how to serve.

    Attributes:
      host: address to listen on.
      http_port, grpc_port: 0 picks a free one.
      drain_delay_s: seconds after the first signal in which requests are still taken, at least, while `/ready` says
        503; 0: they are refused at once.
      drain_grace_s: seconds that open requests get after that.
      exit_on_death: the process ends when its engine has died; else it stays, answering 503.
      http: the HTTP front's own settings; its keys, guards and body limit hold for gRPC too.
      tls: for both fronts; None: plain text.
      limits: of the HTTP front.
      tool_call_parser: see `GenerationService`.
      kv_host: address of a prefill server's own port, as it is told.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    drain_delay_s: float = 0.0
    drain_grace_s: float = 30.0
    exit_on_death: bool = True
    http: HttpSettings = field(default_factory=HttpSettings)
    tls: TlsFiles | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    tool_call_parser: str = AUTO_TOOL_CALL_PARSER
    kv_host: str = "127.0.0.1"


class Launcher:
    """One server process.

    Args:
      engine: not started yet; it loads in a thread of its own once the ports are bound.
      settings: see `ServerSettings`.
      display: what the operator sees.
      remote_prefill: a decode server's; prefill_server: a prefill server's. Both are started when the engine is ready.
    """

    def __init__(
        self,
        engine: EngineApi,
        settings: ServerSettings,
        display: StartupDisplay,
        remote_prefill: RemotePrefill | None = None,
        prefill_server: PrefillServer | None = None,
    ) -> None:
        self._remote_prefill = remote_prefill
        self._prefill_server = prefill_server
        self._engine = engine
        self._settings = settings
        self._display = display
        self._stop = asyncio.Event()
        self._http_failed = False

    async def run(self) -> int:
        """Serves until a signal, a failed start, the engine's death or the end of the HTTP server.

        Returns:
          The process's exit status.
        """
        settings = self._settings
        grpc_end: asyncio.Task[None] | None = None
        service = GenerationService(self._engine, settings.tool_call_parser, self._remote_prefill)
        try:
            http_socket = bind(settings.host, settings.http_port)
            grpc_server = GrpcServer(service, settings.host, settings.grpc_port, settings.http, settings.tls)
        except OSError as error:
            self._display.fail(str(error))
            return 1
        self._catch_signals()
        raise_open_files_limit()
        self._engine.start()
        http_server = HttpServer(
            http_config(
                build_app(self._engine, settings.http, service),
                settings.tls,
                settings.limits,
                timeout_graceful_shutdown=round(FLUSH_S),
            )
        )
        http_task = asyncio.create_task(http_server.serve([http_socket]))
        http_task.add_done_callback(lambda task: self._http_ended(task, http_server))
        await grpc_server.start()
        http_address = address(settings.host, http_socket.getsockname()[1])
        started = await wait_until_ready(self._engine, self._stop)
        failure = await asyncio.to_thread(self._start_sides) if started else ""
        if failure:
            self._display.fail(failure)
        elif started:
            grpc_address = address(settings.host, grpc_server.port)
            scheme = "http" if settings.tls is None else "https"
            key, playground = bool(settings.http.api_keys), settings.http.enable_playground
            self._display.ready(self._engine.model_name, f"{scheme}://{http_address}", grpc_address, key, playground)
            kv = f" kv={settings.kv_host}:{self._prefill_server.port}" if self._prefill_server else ""
            print(f"jaxserve ready http={http_address} grpc={grpc_address}{kv}", flush=True)
            await self._until_stopped()
        if started and not failure and self._engine.state == "dead":
            self._display.note(f"the engine died; the process ends in {DEATH_S:g} s")
            await self._wait_for_stop(DEATH_S)
        elif started and not failure:
            service.leave()
            http_server.close_after_answers()
            ends_at = time.monotonic() + settings.drain_delay_s + settings.drain_grace_s
            if settings.drain_delay_s and self._engine.state != "stuck":
                self._display.note(f"leaving: requests are taken for {settings.drain_delay_s:g} s at least")
                await self._leave(http_server)
                # Tells gRPC clients to connect elsewhere, which they do in the midst of what they call.
                grpc_end = asyncio.create_task(grpc_server.stop(max(ends_at - time.monotonic(), 0.0) + FLUSH_S))
            left_s = max(ends_at - time.monotonic(), 0.0)
            self._display.note(f"stopping: open requests have {left_s:.0f} s; a second signal ends now")
            sides = asyncio.create_task(asyncio.to_thread(self._drain_sides))
            await service.drain(left_s)
            if self._engine.state == "stuck":
                self._display.note("stopping: the engine is stuck; what was open has failed")
            if not await self._engine.drain(max(ends_at - time.monotonic(), 0.0)) and self._engine.state == "draining":
                self._display.note("stopping: the grace period is over; what was left has been cut short")
            await sides
        self._stop_sides()
        self._display.close()
        http_server.should_exit = True
        await asyncio.wait([http_task])
        await asyncio.gather(*([grpc_end] if grpc_end else []), grpc_server.stop(FLUSH_S))
        return await self._end_engine(started, 1 if failure or self._http_failed else 0)

    async def _until_stopped(self) -> None:
        """Until there was a signal, or the engine is dead and that ends the process."""
        while not await self._wait_for_stop(_LOOK_S):
            if self._engine.state == "dead" and self._settings.exit_on_death:
                return

    async def _wait_for_stop(self, seconds: float) -> bool:
        """Waits so long; whether there was a signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    def _start_sides(self) -> str:
        """Begins to compute prompts for others, or to ask others for them; why that cannot be, or ""."""
        try:
            for side in (self._remote_prefill, self._prefill_server):
                if side is not None:
                    side.start(cast("AsyncEngine", self._engine))
        except (ValueError, RuntimeError, OSError) as error:
            return str(error)
        return ""

    def _drain_sides(self) -> None:
        if self._prefill_server is not None:
            self._prefill_server.drain(self._settings.drain_grace_s)

    def _stop_sides(self) -> None:
        for side in (self._remote_prefill, self._prefill_server):
            if side is not None:
                side.stop()

    async def _leave(self, http_server: HttpServer) -> None:
        """Waits out the delay, then for connections from before; half of the grace is left to what is open then."""
        told_at = time.monotonic() + self._settings.drain_delay_s
        ends_at = told_at + self._settings.drain_grace_s / 2
        while (now := time.monotonic()) < ends_at and self._engine.error is None and self._engine.state != "stuck":
            if now >= told_at and not http_server.num_kept:
                return
            await asyncio.sleep(LEAVE_PERIOD_S)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self._stop.set()

    def _http_ended(self, task: asyncio.Task[None], http_server: HttpServer) -> None:
        if task.cancelled():
            return  # with the process' main task, whose own error is shown
        if not http_server.should_exit or task.exception() is not None:
            log.error("the HTTP server has ended by itself; the process ends", exc_info=task.exception())
            self._http_failed = True
            self._stop.set()

    async def _end_engine(self, started: bool, status: int) -> int:
        """Ends it; the process's exit status, `status` at least."""
        if self._engine.error is not None and not started:
            self._display.fail(start_error(self._engine.error))
            # The engine's thread has ended by itself, unless another process' end was the cause.
            if _engine_runs():
                flush_and_exit(1)
            return 1
        if not started:
            # Loading or compiling cannot be interrupted, and nothing of it is worth waiting for.
            flush_and_exit(status)
        await asyncio.to_thread(self._engine.shutdown)
        if self._engine.error is not None:
            status = 1
        if _engine_runs():
            flush_and_exit(status)
        return status


def _engine_runs() -> bool:
    """Whether the engine's thread has not ended."""
    return any(thread.name == "engine" for thread in threading.enumerate())
