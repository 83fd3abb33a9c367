"""A uvicorn server in a thread, for tests that need real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn


class RunningServer:
    """Serves `make_app()` on a free port; the app is made on the server's own event loop.

    Attributes:
      url: base URL.
      loop: its event loop, for `call`.
    """

    def __init__(self, make_app: Callable[[], Any]) -> None:
        self._make_app = make_app
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(10), "the test server did not start"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        config = uvicorn.Config(self._make_app(), log_level="warning", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.005)
        self._started.set()
        await serving

    def call[T](self, function: Callable[[], T]) -> T:
        """Runs `function` on the server's loop, for objects that are not thread-safe."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def stop(self) -> None:
        """Ends it."""
        self._server.should_exit = True
        self._thread.join(10)
