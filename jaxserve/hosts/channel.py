"""Channel: authenticated frames between two processes of an engine.

    connect ─▶ leader: magic, nonce ─▶ follower: nonce, id, proof ─▶ leader: proof ─▶ frames, both ways

A frame is length, kind, 16 bytes of proof, payload. The proof is a keyed BLAKE2b over the proof of the frame before,
head and payload; each direction has a key of its own, made from the shared token and both nonces. So a frame that is
damaged, repeated, left out, out of order or made by somebody else ends the connection before its payload is looked at.
Payloads are not encrypted. Nothing but bytes and JSON is ever read from a peer, and no more than the bounds below.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.core import HostLostError

MAX_FRAME_BYTES = 1 << 30
"""Largest payload; adapters are sent in pieces."""
PROOF_BYTES = 16
HANDSHAKE_S = 10.0
"""Most time that a handshake may take."""

_MAGIC = b"jaxserve hosts 1\n"
_NONCE_BYTES = 32
_KEY_BYTES = 32
_HEAD = struct.Struct("<IB")
_ANSWER = struct.Struct(f"<{_NONCE_BYTES}sI{_KEY_BYTES}s")
_TIMEVAL = struct.Struct("@ll")


class Channel:
    """One connection after its handshake. Any thread may send; one thread receives.

    Args:
      connection: blocking; owned from now on.
      send_key, receive_key: of the two directions.
      peer: names the other side in messages.
      send_timeout_s: a send that makes no headway for so long fails.

    Attributes:
      on_bytes: called by the receiving thread whenever some have come, be it of a frame that is not whole.
    """

    def __init__(
        self, connection: socket.socket, send_key: bytes, receive_key: bytes, peer: str, send_timeout_s: float
    ) -> None:
        self.peer = peer
        self.on_bytes: Callable[[], None] = lambda: None
        self._socket = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = bytes(PROOF_BYTES)
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeval = _TIMEVAL.pack(int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, kind: int, *parts: bytes | memoryview) -> None:
        """Sends a frame whose payload is `parts`, one behind the other.

        Raises:
          HostLostError: the connection is gone, or the peer takes nothing.
        """
        with self._sending:
            self._send(kind, parts)

    def send_if_idle(self, kind: int, payload: bytes = b"") -> None:
        """Sends a frame, unless another thread is sending: that is a sign of life too.

        Raises:
          HostLostError: as `send`.
        """
        if self._sending.acquire(blocking=False):
            try:
                self._send(kind, (payload,))
            finally:
                self._sending.release()

    def receive(self) -> tuple[int, bytes]:
        """The next frame: kind and payload; waits for it.

        Raises:
          HostLostError: the connection is gone, or what came is no frame of the peer's.
        """
        head = self._read(_HEAD.size + PROOF_BYTES)
        length, kind = _HEAD.unpack_from(head)
        proof = head[_HEAD.size :]
        if length > MAX_FRAME_BYTES:
            raise HostLostError(f"{self.peer} sent a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
        payload = self._read(length)
        self._received = _proof(self._receive_key, self._received, head[: _HEAD.size], (payload,))
        if not hmac.compare_digest(self._received, proof):
            raise HostLostError(f"{self.peer} sent a frame that is damaged, out of order or not its own")
        return kind, payload

    def close(self) -> None:
        """Ends the connection; whoever waits in `receive` or `send` fails."""
        with contextlib.suppress(OSError):  # it had ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: int, parts: Sequence[bytes | memoryview]) -> None:
        head = _HEAD.pack(sum(map(len, parts)), kind)
        self._sent = _proof(self._send_key, self._sent, head, parts)
        try:
            self._socket.sendall(b"".join((head, self._sent, *parts)))
        except OSError as error:
            raise HostLostError(f"{self.peer} cannot be reached: {error}") from error

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = self._socket.recv_into(view)
            except OSError as error:
                raise HostLostError(f"{self.peer} is gone: {error}") from error
            if not got:
                raise HostLostError(f"{self.peer} is gone: it closed the connection")
            self.on_bytes()
            view = view[got:]
        return bytes(data)


def accept_peer(connection: socket.socket, token: bytes, send_timeout_s: float) -> tuple[int, Channel]:
    """The leader's side of the handshake.

    Returns:
      Process id and channel of a peer that knows the token.

    Raises:
      HostLostError: it does not, or is too slow; the connection is closed.
    """
    shake = _Handshake(connection)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        shake.send(_MAGIC + nonce)
        other, process_id, proof = _ANSWER.unpack(shake.read(_ANSWER.size))
        both = nonce + other + struct.pack("<I", process_id)
        if not hmac.compare_digest(proof, _key(token, b"follower", both)):
            raise HostLostError("a process that wants to join does not know the token (host_token_file)")
        shake.send(_key(token, b"leader", both))
    except (OSError, HostLostError) as error:
        connection.close()
        raise HostLostError(str(error)) from error
    keys = _key(token, b"down", both), _key(token, b"up", both)
    return process_id, Channel(connection, *keys, f"process {process_id}", send_timeout_s)


def join_leader(connection: socket.socket, token: bytes, process_id: int, send_timeout_s: float) -> Channel:
    """A follower's side of the handshake.

    Raises:
      HostLostError: the other side is no leader that knows the token; the connection is closed.
    """
    shake = _Handshake(connection)
    try:
        greeting = shake.read(len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            raise HostLostError("what answers at control_address is no leader of this version")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        both = greeting[len(_MAGIC) :] + nonce + struct.pack("<I", process_id)
        shake.send(_ANSWER.pack(nonce, process_id, _key(token, b"follower", both)))
        if not hmac.compare_digest(shake.read(_KEY_BYTES), _key(token, b"leader", both)):
            raise HostLostError("the leader does not know the token (host_token_file)")
    except (OSError, HostLostError) as error:
        connection.close()
        raise HostLostError(f"the leader did not take this process in: {error}") from error
    keys = _key(token, b"up", both), _key(token, b"down", both)
    return Channel(connection, *keys, "the leader (process 0)", send_timeout_s)


class _Handshake:
    """A connection until its end is known to be a peer: all of it within `HANDSHAKE_S`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._end = time.monotonic() + HANDSHAKE_S

    def send(self, data: bytes) -> None:
        self._limit()
        self._socket.sendall(data)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit()
            more = self._socket.recv(count - len(data))
            if not more:
                raise HostLostError("the connection was closed during the handshake; is host_token_file the same?")
            data += more
        return data

    def _limit(self) -> None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)


def _key(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, purpose + b"\0" + nonces, "sha256")


def _proof(key: bytes, before: bytes, head: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(before, digest_size=PROOF_BYTES, key=key)
    digest.update(head)
    for part in parts:
        digest.update(part)
    return digest.digest()
