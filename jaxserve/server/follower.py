"""A server process that is not process 0 of its engine: it follows, and serves nothing but its probes.

It ends when the leader stops (exit status 0), and when the leader is lost or its own part fails (1). Once the leader
has taken it in, a signal does not end it, since that would end the engine before its requests: whoever stops all
processes at once has the leader drain. A second one does, and any before that.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.config import EngineConfig
from jaxserve.core import HostLostError
from jaxserve.engine.follower import EngineFollower
from jaxserve.server.bounded_http import http_config
from jaxserve.server.head_requests import HeadRequests
from jaxserve.server.json_body import JsonResponse
from jaxserve.server.launcher import ServerSettings
from jaxserve.server.listening import address, bind
from jaxserve.server.log_format import operator_console, tell_failure
from jaxserve.server.process import flush_and_exit
from jaxserve.server.start_errors import start_error

log = logging.getLogger(__name__)

_SIGNALS = signal.SIGTERM, signal.SIGINT


def follow_leader(config: EngineConfig, settings: ServerSettings, log_format: str) -> int:
    """Follows until the leader stops; ends the process itself where threads may be stuck.

    Returns:
      The exit status.
    """
    console = operator_console(log_format)

    def on_lost(error: HostLostError) -> None:
        tell_failure(console, f"this process ends: {error}")
        flush_and_exit(1)

    def signalled(_: int, __: Any) -> None:
        log.warning("told to stop; waits until the leader has drained and stops; a second signal ends now")
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def joined() -> None:
        for number in _SIGNALS:
            signal.signal(number, signalled)

    # Waiting for the other processes, Python runs no handlers: until then a signal is the kernel's to act on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    follower = EngineFollower(config, on_lost, joined)
    try:
        http_socket = bind(settings.host, settings.http_port)
    except OSError as error:
        tell_failure(console, str(error))
        return 1
    server = uvicorn.Server(http_config(_probes(follower), settings.tls, settings.limits))
    scheme = "http" if settings.tls is None else "https"
    log.info("probes at %s://%s", scheme, address(settings.host, http_socket.getsockname()[1]))
    threading.Thread(target=_serve_probes, args=(server, http_socket), name="probes", daemon=True).start()
    try:
        follower.run()
    except Exception as error:
        tell_failure(console, start_error(error))
        # Not through jax's own end, which waits for the other processes.
        flush_and_exit(1)
    log.info("the leader has stopped")
    return 0


def _serve_probes(server: uvicorn.Server, http_socket: socket.socket) -> None:
    """Until the process ends. Without probes it goes on: whoever looks at them decides."""
    try:
        server.run([http_socket])
    finally:
        log.error("the probes are not answered any more")


def _probes(follower: EngineFollower) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HeadRequests)

    @app.get("/health")
    async def health(_: Request) -> Response:
        return JsonResponse({"status": "ok", "state": follower.state})

    @app.get("/ready")
    async def ready(_: Request) -> Response:
        is_ready = follower.state == "ready"
        done, total, what = follower.progress
        body = {"ready": is_ready, "state": follower.state, "progress": {"done": done, "total": total, "what": what}}
        return JsonResponse(body, 200 if is_ready else 503)

    return app
