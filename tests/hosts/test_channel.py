"""The channel between two processes: who may join, and what is taken from a peer."""

import socket
import struct
import threading
import time

import pytest

from jaxserve.core import HostLostError
from jaxserve.hosts import channel as module
from jaxserve.hosts.channel import MAX_FRAME_BYTES, accept_peer, join_leader
from tests.server.running import until

TOKEN = b"sixteen letters or more"


def tcp_pair():
    """Two connected sockets, by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return listener.accept()[0], one


def shake(leader_token=TOKEN, follower_token=TOKEN, process_id=3):
    """Both ends of a handshake: each the channel or the error."""
    ends, found = tcp_pair(), {}

    def lead():
        try:
            found["leader"] = accept_peer(ends[0], leader_token, 5.0)
        except HostLostError as error:
            found["leader"] = error

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        found["follower"] = join_leader(ends[1], follower_token, process_id, 5.0)
    except HostLostError as error:
        found["follower"] = error
    thread.join(10)
    return found["leader"], found["follower"]


@pytest.fixture
def pair():
    (process_id, leader), follower = shake()
    assert process_id == 3
    yield leader, follower
    leader.close()
    follower.close()


class Wire:
    """Stands between a channel and its socket: keeps what is sent."""

    def __init__(self, channel):
        self.socket, self.frames = channel._socket, []
        channel._socket = self

    def sendall(self, data):
        self.frames.append(bytes(data))

    def close(self):
        self.socket.close()

    def shutdown(self, how):
        self.socket.shutdown(how)


def test_frames_arrive_in_order_both_ways(pair):
    leader, follower = pair
    leader.send(4, b"one", memoryview(b"two"))
    leader.send_if_idle(0)
    leader.send(5)
    follower.send(8, b"x" * 300_000)
    assert [follower.receive() for _ in range(3)] == [(4, b"onetwo"), (0, b""), (5, b"")]
    assert leader.receive() == (8, b"x" * 300_000)


def test_who_does_not_know_the_token_is_not_taken_in():
    leader, follower = shake(follower_token=b"another token of some length")
    assert "does not know the token" in str(leader)
    assert isinstance(follower, HostLostError)


def test_a_leader_that_does_not_know_the_token_is_not_followed():
    ends = tcp_pair()
    ends[0].sendall(module._MAGIC + bytes(32) + bytes(32))
    with pytest.raises(HostLostError, match="the leader does not know the token"):
        join_leader(ends[1], TOKEN, 1, 5.0)
    ends[0].close()


def test_what_is_no_leader_is_not_followed():
    ends = tcp_pair()
    ends[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
    with pytest.raises(HostLostError, match="is no leader"):
        join_leader(ends[1], TOKEN, 1, 5.0)
    ends[0].close()


def test_a_peer_that_says_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.05)
    ends = tcp_pair()
    with pytest.raises(HostLostError, match="timed out"):
        accept_peer(ends[0], TOKEN, 5.0)
    ends[1].close()


@pytest.mark.parametrize("fault", ["damaged", "left out", "repeated", "swapped", "another kind", "another's"])
def test_a_frame_that_is_not_the_next_one_of_the_peer_is_refused(pair, fault):
    leader, follower = pair
    wire = Wire(leader)
    for payload in (b"first", b"second", b"third"):
        leader.send(4, payload)
    first, second, third = wire.frames
    if fault == "damaged":
        second = second[:-1] + b"D"
    elif fault == "left out":
        second = b""
    elif fault == "repeated":
        second = first
    elif fault == "swapped":
        second, third = third, second
    elif fault == "another kind":
        second = second[:4] + b"\5" + second[5:]
    else:
        (_, other), other_follower = shake()
        other_wire = Wire(other)
        other.send(4, b"first")
        other.send(4, b"second")
        second = other_wire.frames[1]
        other.close()
        other_follower.close()
    wire.socket.sendall(first + second + third)
    assert follower.receive() == (4, b"first")
    with pytest.raises(HostLostError, match="damaged, out of order or not its own"):
        follower.receive()


def test_a_handshake_has_one_deadline_however_often_something_comes(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.4)
    leader_end, other = tcp_pair()
    ended = threading.Event()

    def trickle():
        while not ended.wait(0.1):
            other.sendall(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    began = time.monotonic()
    with pytest.raises(HostLostError, match="timed out"):
        accept_peer(leader_end, TOKEN, 5.0)
    assert time.monotonic() - began < 3
    ended.set()
    trickling.join(10)
    other.close()


def test_bytes_of_a_frame_that_is_not_whole_are_told(pair):
    leader, follower = pair
    wire, heard = Wire(leader), []
    follower.on_bytes = lambda: heard.append(1)
    leader.send(4, bytes(100))
    reading = threading.Thread(target=follower.receive)
    reading.start()
    for part in (wire.frames[0][:60], wire.frames[0][60:]):
        before = len(heard)
        wire.socket.sendall(part)
        until(lambda before=before: len(heard) > before, 10, "bytes")
    reading.join(10)


def test_a_frame_over_the_limit_is_refused_before_it_is_read(pair):
    leader, follower = pair
    leader._socket.sendall(struct.pack("<IB", MAX_FRAME_BYTES + 1, 4) + bytes(16))
    with pytest.raises(HostLostError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes"):
        follower.receive()


def test_a_closed_connection_and_one_that_takes_nothing_are_errors(pair):
    leader, follower = pair
    follower.close()
    with pytest.raises(HostLostError, match="process 3 is gone"):
        leader.receive()
    (_, other), _ends = shake()
    timeval = struct.pack("@ll", 0, 50_000)
    other._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    with pytest.raises(HostLostError, match="cannot be reached"):
        other.send(4, bytes(1 << 24))
    other.close()
    _ends.close()
