"""The leader's side of its followers: who joins, what they agree on, and every way of losing one."""

import itertools
import json
import socket
import threading
import time

import pytest

from jaxserve.core import HostLostError
from jaxserve.hosts import agree_on_given, agree_on_memory
from jaxserve.hosts.channel import join_leader
from jaxserve.hosts.leader import Followers
from jaxserve.hosts.messages import Kind, write_digest
from tests.server.running import until

TOKEN = b"sixteen letters or more"
SAME, OTHER = bytes(16), bytes([1] * 16)


class Party:
    """A leader, and channels that stand for its followers."""

    def __init__(self, count=2, timeout_s=20.0):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = probe.getsockname()
        self.leader = Followers(self.address, count + 1, TOKEN, timeout_s)
        self.lost = []
        self.leader.on_lost = self.lost.append
        accepting = threading.Thread(target=self.leader.accept, args=(20,))
        accepting.start()
        self.channels = [self.join(process_id) for process_id in range(1, count + 1)]
        accepting.join(20)

    def join(self, process_id, token=TOKEN):
        return join_leader(socket.create_connection(self.address), token, process_id, 5.0)

    def until_lost(self):
        until(lambda: self.lost, 10, "loss")
        (error,) = self.lost
        return str(error)

    def close(self):
        self.leader.close()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def make_party():
    made = []

    def make(**settings):
        made.append(Party(**settings))
        return made[-1]

    yield make
    for party in made:
        party.close()


def kinds_of(channel, count):
    """Of the next frames but signs of life."""
    frames = (channel.receive()[0] for _ in itertools.count())
    return list(itertools.islice((kind for kind in frames if kind != Kind.PULSE), count))


def waiting_leader(timeout_s, within_s=20):
    """A leader that waits for two followers on a thread, how one joins it, and what `accept` raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    leader, raised = Followers(address, 3, TOKEN, timeout_s), []

    def accept():
        try:
            leader.accept(within_s)
        except HostLostError as error:
            raised.append(str(error))

    accepting = threading.Thread(target=accept)
    accepting.start()
    return leader, accepting, raised, lambda: socket.create_connection(address)


def test_who_has_joined_gets_signs_of_life_while_others_are_waited_for():
    leader, accepting, raised, connect = waiting_leader(1.0)
    first = join_leader(connect(), TOKEN, 1, 5.0)
    for _ in range(30):  # half as long again as the timeout
        first.send(Kind.PULSE)
        assert first.receive() == (Kind.PULSE, b"")
    second = join_leader(connect(), TOKEN, 2, 5.0)
    accepting.join(20)
    assert not raised and leader.error is None
    leader.close()
    first.close()
    second.close()


def test_who_has_joined_is_told_that_another_did_not_come():
    _, accepting, raised, connect = waiting_leader(20.0, within_s=0.5)
    first = join_leader(connect(), TOKEN, 1, 5.0)
    accepting.join(20)
    assert raised == ["no connection from process(es) 2 within 0.5 s"]
    assert first.receive() == (Kind.FAILED, raised[0].encode())
    first.close()


def test_one_that_is_lost_ends_the_wait_for_the_others():
    _, accepting, raised, connect = waiting_leader(20.0)
    join_leader(connect(), TOKEN, 1, 5.0).close()
    accepting.join(10)
    assert raised == ["process 1 is gone: it closed the connection"]


def test_strangers_that_say_nothing_do_not_hold_up_the_start():
    leader, accepting, raised, connect = waiting_leader(20.0)
    began = time.monotonic()
    strangers = [connect() for _ in range(8)]
    followers = [join_leader(connect(), TOKEN, process_id, 5.0) for process_id in (1, 2)]
    accepting.join(20)
    assert not raised and time.monotonic() < began + 8, "a stranger's handshake was waited for"
    leader.close()
    for each in (*strangers, *followers):
        each.close()


def test_strangers_and_taken_ids_are_refused_while_it_waits():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    leader = Followers(address, 3, TOKEN, 20.0)
    accepting = threading.Thread(target=leader.accept, args=(20,))
    accepting.start()

    def join(process_id, token=TOKEN):
        return join_leader(socket.create_connection(address), token, process_id, 5.0)

    first = join(1)
    with pytest.raises(HostLostError):
        join(2, b"not the token at all")
    for taken in (1, 3, 0):
        refused = join(taken)
        with pytest.raises(HostLostError, match="is gone"):
            refused.receive()
        refused.close()
    second = join(2)
    accepting.join(20)
    with pytest.raises(OSError):
        socket.create_connection(address)  # it listens no longer than it must
    leader.close()
    assert kinds_of(first, 1) == kinds_of(second, 1) == [Kind.STOP]
    first.close()
    second.close()


def test_a_follower_that_does_not_come_is_named():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    leader = Followers(address, 3, TOKEN, 20.0)
    with pytest.raises(HostLostError, match=r"no connection from process\(es\) 1, 2 within 0.1 s"):
        leader.accept(0.1)


def test_settings_that_differ_are_named(make_party):
    party = make_party()
    own = {"--dtype": "float32", "the checkpoint": "ab"}
    for channel, dtype in zip(party.channels, ("float32", "bfloat16"), strict=True):
        channel.send(Kind.REPORT, json.dumps(own | {"--dtype": dtype}).encode())
    with pytest.raises(ValueError, match="--dtype is bfloat16 in process 2 and float32 in process 0"):
        agree_on_given(party.leader, own)


def test_the_least_memory_is_everybodys(make_party):
    party = make_party()
    for channel, free in zip(party.channels, (700, 900), strict=True):
        channel.send(Kind.REPORT, json.dumps({"free_bytes": free}).encode())
    assert agree_on_memory(party.leader, 800) == 700
    for channel in party.channels:
        assert channel.receive() == (Kind.DECISION, b'{"free_bytes": 700}')


@pytest.mark.parametrize("when", ["before", "after"])
def test_equal_digests_pass_and_another_one_is_a_loss(make_party, when):
    party = make_party()
    for iteration, last in ((0, SAME), (1, OTHER)):
        party.leader.run(Kind.SAMPLE, b"x", ends_step=iteration)
        if when == "after":
            party.leader.compare_step(iteration, SAME)
        party.channels[0].send(Kind.DIGEST, write_digest(iteration, SAME))
        party.channels[1].send(Kind.DIGEST, write_digest(iteration, last))
        if when == "before":
            until(lambda: not any(follower.outstanding for follower in party.leader._followers), 10, "digests")
            if last == OTHER:
                with pytest.raises(HostLostError, match="diverged"):
                    party.leader.compare_step(iteration, SAME)
            else:
                party.leader.compare_step(iteration, SAME)
        if last == SAME:
            until(lambda: not (party.leader._digests or party.leader._early), 10, "nothing left to compare")
    assert "process 2 has diverged: its plans or tokens up to iteration 1" in party.until_lost()
    with pytest.raises(HostLostError, match="diverged"):
        party.leader.run(Kind.STEP, b"x")
    # The others end too: the leader's connections are closed.
    with pytest.raises(HostLostError, match="is gone"):
        kinds_of(party.channels[0], 10)


def test_a_closed_connection_an_error_and_nonsense_are_losses(make_party):
    party = make_party()
    party.channels[1].close()
    assert party.until_lost() == "process 2 is gone: it closed the connection"
    party = make_party()
    party.channels[0].send(Kind.FAILED, b"ValueError: no such file")
    assert party.until_lost() == "process 1 failed: ValueError: no such file"
    party = make_party()
    party.channels[0].send(Kind.DIGEST, write_digest(3, SAME))
    assert party.until_lost() == "process 1 tells of step 3 out of order"
    party = make_party()
    party.channels[0].send(Kind.REPORT, b"{")
    assert "process 1 sent a message that cannot be read" in party.until_lost()
    with pytest.raises(HostLostError):
        party.leader.reports()


def test_silence_is_a_loss_and_signs_of_life_are_none(make_party):
    party = make_party(timeout_s=1.0)
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        for channel in party.channels:
            channel.send(Kind.PULSE)
        time.sleep(0.05)
    assert not party.lost
    while not party.lost:
        party.channels[0].send_if_idle(Kind.PULSE)
        time.sleep(0.05)
        assert time.monotonic() < end + 10
    assert party.until_lost() == "process 2 gave no sign of life for 1 s (host_timeout_s)"


def test_a_step_that_does_not_end_is_a_loss_though_the_process_lives(make_party):
    party = make_party(count=1, timeout_s=1.0)
    party.leader.run(Kind.SAMPLE, b"x", ends_step=7)
    end = time.monotonic() + 20
    while not party.lost:
        party.channels[0].send(Kind.PULSE)
        time.sleep(0.05)
        assert time.monotonic() < end
    assert party.until_lost() == "process 1 has not ended iteration 7 within 1 s (host_timeout_s)"


def test_what_a_follower_sends_and_cannot_be_taken_in_is_a_loss_with_its_cause(make_party, monkeypatch, caplog):
    party = make_party()

    def fails(*digest):
        raise ZeroDivisionError("of a digest")

    monkeypatch.setattr(party.leader, "_take_digest", fails)
    party.channels[1].send(Kind.DIGEST, write_digest(0, SAME))
    assert party.until_lost() == "what process 2 sent cannot be taken in: ZeroDivisionError('of a digest')"
    assert any(each.exc_info and each.exc_info[0] is ZeroDivisionError for each in caplog.records)
