"""A follower's connection to its leader: when the leader counts as lost, and when not."""

import socket
import threading
import time

import numpy as np
import pytest

from jaxserve.hosts import follower as module
from jaxserve.hosts import messages
from jaxserve.hosts.channel import accept_peer
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.messages import Kind, pieces_of, read_arrays, write_arrays
from tests.server.running import until

TOKEN = b"sixteen letters or more"


class Pair:
    """A follower, and the leader's channel to it; `refuse` connections are closed first."""

    def __init__(self, timeout_s, refuse=0):
        self.lost = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = threading.Thread(target=self._accept, args=(listener, refuse))
            accepting.start()
            self.follower = Follower(listener.getsockname(), 1, TOKEN, timeout_s, self.lost.append, 20.0)
            accepting.join(20)

    def _accept(self, listener, refuse):
        for _ in range(refuse):
            listener.accept()[0].close()
        _, self.channel = accept_peer(listener.accept()[0], TOKEN, 5.0)

    def until_lost(self):
        until(lambda: self.lost, 20, "the loss")
        return str(self.lost[0])


@pytest.fixture
def make_pair():
    made = []

    def make(*args):
        made.append(Pair(*args))
        return made[-1]

    yield make
    for pair in made:
        pair.channel.close()
        pair.follower._pulse.stop()
        pair.follower._channel.close()


def test_bytes_of_a_long_frame_are_signs_of_life(make_pair):
    pair = make_pair(1.0)
    pair.channel._socket.sendall(b"\0\0\1\0\7")  # the head of 64 KiB
    end = time.monotonic() + 1.8
    while time.monotonic() < end:
        pair.channel._socket.sendall(bytes(10))
        time.sleep(0.05)
    assert not pair.lost
    assert pair.until_lost() == "the leader (process 0) gave no sign of life for 1 s (host_timeout_s)"


def test_frames_that_wait_to_be_run_are_no_silence(make_pair):
    pair = make_pair(0.5)
    for _ in range(module._MAX_WAITING + 1):
        pair.channel.send(Kind.DECISION, b"{}")
    time.sleep(1.2)
    assert not pair.lost
    for _ in range(module._MAX_WAITING + 1):
        pair.follower.decision()
    assert "gave no sign of life" in pair.until_lost()


def test_it_joins_again_when_it_was_sent_away(make_pair, monkeypatch):
    monkeypatch.setattr(module, "_REFUSED_S", 0.01)
    pair = make_pair(20.0, 2)
    pair.follower.report({})
    assert pair.channel.receive() == (Kind.REPORT, b"{}")


def test_arrays_go_in_pieces_of_any_size(monkeypatch):
    monkeypatch.setattr(messages, "PIECE_BYTES", 10)
    arrays = [np.arange(33, dtype=np.int32).reshape(3, 11), np.zeros((0, 4), np.float32), np.ones(5, np.int8)]
    pieces = [bytes(piece) for piece in pieces_of(write_arrays({"place": 2}, arrays))]
    assert max(map(len, pieces)) == 10
    about, found = read_arrays(b"".join(pieces))
    assert about == {"place": 2}
    for one, other in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_the_leader_sends_and_cannot_be_taken_in_is_its_loss_with_the_cause(make_pair, monkeypatch):
    pair = make_pair(20.0)

    def fails(frame):
        raise ZeroDivisionError("of a frame")

    monkeypatch.setattr(pair.follower._frames, "put", fails)
    pair.channel.send(Kind.DECISION, b"{}")
    assert pair.until_lost() == "what the leader (process 0) sent cannot be taken in: ZeroDivisionError('of a frame')"
