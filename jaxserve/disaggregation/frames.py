"""Frames: what prefill and decode servers say to each other over one TCP connection.

A frame is a fixed head, a small JSON object and, of some kinds, bytes:

    kind u8 | 3 bytes of zero | object length u32 | payload length u64 | object | payload        big-endian

    decode server                                   prefill server
                               <-- HELLO            version, nonce, K/V layout; or REFUSE while it starts
    AUTH: proof, nonce -->                          of the shared token, which itself is never sent
                               <-- PROOF            the other side's
    PULL: prompt, terms -->                         payload: token ids, int32
                               <-- ACCEPT | REFUSE
                               <-- BLOCK            payload: pages; or the number to pull them by
    ACK: block -->                                  so many blocks at most are ahead of it
                               <-- WAIT             every second while nothing is computed yet
                               <-- END | REFUSE
    DONE -->                                        everything may be forgotten; also said to give up

Every length is checked before memory is taken for it, every wait has an end, and nothing is unpickled. Pages are not
encrypted: the token keeps strangers from asking and from answering, not from listening.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from jaxserve.core import JaxserveError

VERSION = 1
MAX_OBJECT_BYTES = 1 << 16
HANDSHAKE_S = 5.0
"""Most seconds that it takes both sides to show that they know the token."""
MIN_BANDWIDTH = 1e6
"""Bytes per second below which a payload counts as standing still."""
_HEAD = struct.Struct(">BxxxIQ")
_PLACE = struct.Struct(">QIII")


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    AUTH = 2
    PROOF = 3
    PULL = 4
    ACCEPT = 5
    REFUSE = 6
    BLOCK = 7
    ACK = 8
    WAIT = 9
    END = 10
    DONE = 11


class FrameError(JaxserveError):
    """The other side broke a rule of the protocol, or sent damaged bytes."""


class Channel:
    """One side of a connection. Not for several threads.

    Args:
      connection: connected; closed by `close`.
      timeout_s: most seconds that one send, or a frame without its payload, may take; a payload has more, by its
        length.

    Raises, from every method:
      OSError: the connection is lost, or took too long.
      FrameError: a rule is broken.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._limit = self._ends_at = float("inf")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def limit(self, seconds: float = float("inf")) -> None:
        """All that is said from now on is said in so many seconds, until this is called again."""
        self._limit = time.monotonic() + seconds

    def send(self, kind: Kind, fields: dict[str, Any] | None = None, payload: Sequence[memoryview] = ()) -> None:
        """Sends a frame; the parts of `payload` (bytes, one-dimensional) are its payload, one behind the other."""
        text = json.dumps(fields or {}, separators=(",", ":")).encode()
        size = sum(len(part) for part in payload)
        self._start(self._timeout_s)
        self._wait_at_most()
        self._socket.sendall(_HEAD.pack(kind, len(text), size) + text)
        self._start(self._timeout_s + size / MIN_BANDWIDTH)
        for part in payload:
            self._wait_at_most()
            self._socket.sendall(part)

    def receive(self, *kinds: Kind, max_payload: int = 0) -> tuple[Kind, dict[str, Any], int]:
        """The head and the object of the next frame, which must be of one of `kinds`; its payload is next to be read.

        Returns:
          Kind, object, and bytes of payload, at most `max_payload`.
        """
        self._start(self._timeout_s)
        number, text_size, size = _HEAD.unpack(self._exactly(_HEAD.size))
        if number not in kinds:
            expected = " or ".join(kind.name for kind in kinds)
            raise FrameError(f"a frame of kind {_name(number)} came; {expected} was expected")
        if text_size > MAX_OBJECT_BYTES:
            raise FrameError(f"the object of a {_name(number)} has {text_size} bytes; the limit is {MAX_OBJECT_BYTES}")
        if size > max_payload:
            raise FrameError(f"the payload of a {_name(number)} has {size} bytes; the limit is {max_payload}")
        try:
            fields = json.loads(self._exactly(text_size))
        except (ValueError, RecursionError) as error:
            raise FrameError(f"the object of a {_name(number)} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise FrameError(f"the object of a {_name(number)} is {str(fields)[:80]}; it must be an object")
        self._start(self._timeout_s + size / MIN_BANDWIDTH)
        return Kind(number), fields, size

    def read(self, size: int) -> bytearray:
        """So many bytes of payload."""
        return self._exactly(size)

    def read_into(self, view: memoryview) -> None:
        """Payload, until `view` (bytes, one-dimensional, writable) is full."""
        while view:
            self._wait_at_most()
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError(f"the connection ended with {len(view)} bytes missing")
            view = view[count:]

    def close(self) -> None:
        """Ends the connection; the other side sees it at once."""
        self._socket.close()

    def _start(self, seconds: float) -> None:
        self._ends_at = min(time.monotonic() + seconds, self._limit)

    def _wait_at_most(self) -> None:
        """The next call of the socket has what is left of the time."""
        left = self._ends_at - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data


def proof(token: str, nonce: str, side: str) -> str:
    """What shows that `side` ("prefill" or "decode") knows the token, for the other's nonce."""
    return hmac.new(token.encode(), _bytes(f"{side}:{nonce}"), hashlib.sha256).hexdigest()


def proves(token: str, nonce: str, side: str, given: Any) -> bool:
    """Whether `given` is the `proof`; takes as long whether it is or not."""
    return hmac.compare_digest(_bytes(proof(token, nonce, side)), _bytes(str(given)))


def _bytes(text: str) -> bytes:
    """Of JSON, which may have halves of surrogate pairs."""
    return text.encode("utf-8", "surrogatepass")


def checksum(index: int, group: int, first: int, count: int, payload: Sequence[memoryview]) -> int:
    """CRC-32 of a block and of its place: 2.7 GB/s on one core, where BLAKE2 has 0.3 and SHA-256 0.5."""
    value = zlib.crc32(_PLACE.pack(index, group, first, count))
    for part in payload:
        value = zlib.crc32(part, value)
    return value


def field[T](fields: dict[str, Any], name: str, kind: type[T]) -> T:
    """A field of a frame's object.

    Raises:
      FrameError: it is missing or of another type.
    """
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise FrameError(f"{name} is {str(value)[:80]!r}; it must be {kind.__name__}")
    return value


def _name(number: int) -> str:
    return Kind(number).name if number in Kind else str(number)
