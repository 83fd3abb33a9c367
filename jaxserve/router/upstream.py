"""Upstream: the HTTP client towards the replicas, and which headers go through.

aiohttp, since it takes a sixth of httpx's processor time per streamed chunk (docs/replicas.md). Its parser, as
uvicorn's on the other side, takes each message apart and the other puts a new one together, so nothing of a message's
framing is ever copied from one side to the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from jaxserve.router.settings import ProxySettings

FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What a replica that does not answer, or not to the end, shows as."""

_KEEP_ALIVE_S = 2.0
"""Below uvicorn's 5 s, so that a replica never closes a connection just as a request is sent on it."""
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
"""Headers about one connection (RFC 9110, 7.6.1)."""
_FOR_THE_ROUTER = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_OF_UVICORN = frozenset((b"date", b"server"))
"""uvicorn puts its own into every answer."""

Headers = Iterable[tuple[bytes, bytes]]
TextHeaders = list[tuple[str, str]]


def request_headers(headers: Headers) -> TextHeaders:
    """What of a client's headers goes to the replica."""
    return [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in _end_to_end(list(headers), _FOR_THE_ROUTER)
    ]


def response_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What of a replica's headers goes to the client, names in lower case."""
    return [(name.lower(), value) for name, value in _end_to_end(list(headers), _HOP_BY_HOP | _OF_UVICORN)]


def _end_to_end(headers: list[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Iterable[tuple[bytes, bytes]]:
    named = {
        each.strip().lower() for name, value in headers if name.lower() == b"connection" for each in value.split(b",")
    }
    return (pair for pair in headers if pair[0].lower() not in dropped and pair[0].lower() not in named)


class Upstream:
    """A client for all replicas, as a context manager on the event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect_timeout_s, sock_read=self._settings.replica_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._session.close()

    async def open(
        self, url: str, method: str, headers: TextHeaders, body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """Sends a request; its answer once the head is there. Redirects are answers.

        Args:
          url: whole, as it is to stand in the request.

        Raises:
          aiohttp.ClientError, TimeoutError, OSError: one of `FAILURES`.
        """
        return await self._session.request(
            method, URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
        )

    async def get(self, url: str, timeout_s: float, api_key: str | None = None) -> tuple[int, bytes]:
        """Status and body of a short GET.

        Raises:
          aiohttp.ClientError, TimeoutError, OSError: one of `FAILURES`.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
            return answer.status, await answer.read()
