"""Listening sockets, room for their connections, and uvicorn without its own signal handlers."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Any

import uvicorn

_CLOSE = (b"connection", b"close")


class HttpServer(uvicorn.Server):
    """uvicorn whose signals are its caller's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._kept: set[Any] = set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

    def close_after_answers(self) -> None:
        """From now on every answer closes its connection and says so, so that clients go elsewhere for the next."""
        # The second is made anew of the first once a second, to renew the date.
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        self._kept = set(self.server_state.connections)

    @property
    def num_kept(self) -> int:
        """Connections from before `close_after_answers` that are still open and whose clients do not know of it."""
        return sum(not _is_told(each) for each in self._kept & self.server_state.connections)


def _is_told(connection: Any) -> bool:
    """Whether an answer that has begun says that its connection closes, so that no further request comes on it."""
    cycle = connection.cycle
    return cycle is not None and cycle.response_started and _CLOSE in cycle.default_headers


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
      OSError: saying which address and what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # What a name is that has no address stands in no table of errno.
        message = f"HTTP cannot listen on {address(host, port)}: {error.strerror or error}; set --http_port or --host"
        raise OSError(message) from error


def address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def raise_open_files_limit() -> None:
    """Raises the soft limit to the hard one: each connection is an open file, and many systems begin at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse what they say is the limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
