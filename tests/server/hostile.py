"""What clients send that are up to no good, for the server and for the router."""

from __future__ import annotations

import contextlib
import socket

BODY = b'{"prompt": "a", "max_tokens": 1}'
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
_CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
_SIZE = b"%d" % len(BODY)

SMUGGLING = {
    "length and chunked": _POST + b"Content-Length: " + _SIZE + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKED,
    "chunked and length": _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + _CHUNKED,
    "two lengths": _POST + b"Content-Length: " + _SIZE + b"\r\nContent-Length: 5\r\n\r\n" + BODY,
    "two equal lengths": _POST + (b"Content-Length: " + _SIZE + b"\r\n") * 2 + b"\r\n" + BODY,
    "a list of lengths": _POST + b"Content-Length: " + _SIZE + b", " + _SIZE + b"\r\n\r\n" + BODY,
    "a negative length": _POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length with a sign": _POST + b"Content-Length: +5\r\n\r\n" + BODY,
    "a length in hex": _POST + b"Content-Length: 0x20\r\n\r\n" + BODY,
    "a huge length": _POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + BODY,
    "blank before the colon": _POST + b"Content-Length : " + _SIZE + b"\r\n\r\n" + BODY,
    "a folded header": _POST + b"X-A: a\r\n b\r\nContent-Length: " + _SIZE + b"\r\n\r\n" + BODY,
    "a folded length": _POST + b"Content-Length:\r\n " + _SIZE + b"\r\n\r\n" + BODY,
    "bare LF": (_POST + b"Content-Length: " + _SIZE + b"\r\n\r\n").replace(b"\r\n", b"\n") + BODY,
    "one bare LF": _POST + b"X-A: a\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKED,
    "bare CR": _POST + b"X-A: a\rTransfer-Encoding: chunked\r\n\r\n" + _CHUNKED,
    "another coding": _POST + b"Transfer-Encoding: xchunked\r\n\r\n" + _CHUNKED,
    "two codings": _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + _CHUNKED,
    "chunked twice": _POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + _CHUNKED,
    "chunked in HTTP/1.0": _POST.replace(b"/1.1", b"/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKED,
    "a NUL in a header": _POST + b"X-A: a\0b\r\nContent-Length: " + _SIZE + b"\r\n\r\n" + BODY,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a chunk size with a sign": _POST + b"Transfer-Encoding: chunked\r\n\r\n+5\r\nabcde\r\n0\r\n\r\n",
    "a chunk size in another base": _POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
    "a huge chunk size": _POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\nabc",
    "a chunk longer than its size": _POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcde\r\n0\r\n\r\n",
    "a chunk that ends with LF": _POST + b"Transfer-Encoding: chunked\r\n\r\n5\nabcde\n0\n\n",
}
"""Requests whose end two servers may see in two places; each has to be refused and its connection closed."""
NOT_HTTP = {
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/3.0": b"GET /health HTTP/3.0\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60) + b"\r\n\r\n",
    "a blank path": b"GET  HTTP/1.1\r\nHost: a\r\n\r\n",
    "a long URL": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-A: a\r\n" * 1000 + b"\r\n",
    "very many headers": b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 50_000 + b"\r\n",
    "an empty line first": b"\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n",
}
FOLLOWING = b"GET /version HTTP/1.1\r\nHost: test\r\n\r\n"
"""A request that follows a bad one on its connection; nobody may answer it."""


def answers(port: int, data: bytes, wait_s: float = 10.0) -> bytes:
    """All that comes back until the server ends the connection, which has to be in time.

    A server that closes with bytes unread resets the connection, which may lose its answer: then b"".
    """
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(wait_s)
        received = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
            while chunk := connection.recv(65536):
                received += chunk
        return received


def statuses(received: bytes) -> list[int]:
    """The status of each answer."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def is_refused(port: int, data: bytes) -> bool:
    """Whether exactly one answer came, a refusal, and the connection ended.

    Of more than is read in one go the rest is unread, and the answer may be lost with it.
    """
    found = statuses(answers(port, data + FOLLOWING))
    return found == [400] or (len(data) > 60_000 and found == [])
