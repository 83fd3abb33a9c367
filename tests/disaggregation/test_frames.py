"""Frames that come too slowly, or are not what they seem."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from jaxserve.disaggregation.frames import Channel, FrameError, Kind


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        channel = Channel(listener.accept()[0], 0.3)
    yield channel, there
    channel.close()
    there.close()


def test_who_sends_a_frame_byte_by_byte_gets_no_longer_for_it(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            there.sendall(struct.pack(">BxxxIQ", Kind.AUTH, 1000, 0))
            while not stop.wait(0.02):
                there.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(Kind.AUTH)
    stop.set()
    thread.join(60)
    assert time.monotonic() - began >= 0.3


def test_several_frames_have_one_limit_where_one_is_set(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    channel.limit(0.2)
    there.sendall(struct.pack(">BxxxIQ", Kind.WAIT, 2, 0) + b"{}")
    assert channel.receive(Kind.WAIT)[1] == {}
    time.sleep(0.25)
    there.sendall(struct.pack(">BxxxIQ", Kind.WAIT, 2, 0) + b"{}")
    with pytest.raises(TimeoutError):
        channel.receive(Kind.WAIT)
    channel.limit()
    assert channel.receive(Kind.WAIT)[1] == {}


def test_an_object_nested_too_deep_breaks_a_rule(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    text = b"[" * 60_000
    there.sendall(struct.pack(">BxxxIQ", Kind.AUTH, len(text), 0) + text)
    with pytest.raises(FrameError, match="the object of a AUTH is not JSON"):
        channel.receive(Kind.AUTH)
