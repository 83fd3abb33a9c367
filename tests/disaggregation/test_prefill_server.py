"""A prefill server's side of the page stream: who is answered, what is refused, what is held and for how long."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.disaggregation import PrefillServer, PrefillSettings, prefill_server
from jaxserve.disaggregation.frames import Channel, Kind, proof
from jaxserve.disaggregation.kv_layout import KVLayout
from jaxserve.disaggregation.pull import Puller, PullError, Wanted
from tests.disaggregation.pair import GREEDY, Pair, prompts, pull_raw
from tests.server.running import until

TOKEN = "a token of the tests"


@pytest.mark.parametrize("pair", [{"server": {"token": TOKEN}, "remote": {"token": TOKEN}}], indirect=True)
def test_the_token_is_needed(pair: Pair) -> None:
    (prompt,) = prompts(10, (40,))
    pulls = pair.count("kv_transfer_pulls_total")
    refused = pair.prefill_count("kv_export_refused_total", reason="token")
    pair.generate([prompt], GREEDY)
    assert pair.count("kv_transfer_pulls_total") - pulls == 1
    for token in ("", TOKEN + "x"):
        with pytest.raises(PullError, match="the token is wrong") as caught:
            pull_raw(pair, prompt, token)
        assert caught.value.reason == "token"
    assert pair.prefill_count("kv_export_refused_total", reason="token") - refused == 2


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"adapter": "sql"}, "the LoRA adapter 'sql' is not loaded"),
        ({"deadline_s": -1.0}, "deadline"),
        ({"priority": 1 << 40}, "priority is"),
    ],
)
def test_what_the_other_engine_refuses_is_refused(pair: Pair, others: dict[str, Any], message: str) -> None:
    with pytest.raises(PullError, match=message) as caught:
        pull_raw(pair, prompts(11, (40,))[0], **others)
    assert caught.value.reason == "refused"


def test_a_field_of_another_type_is_refused_and_nothing_stays_set_aside(pair: Pair) -> None:
    with pytest.raises(PullError, match=r"priority is '1\.5'; it must be int") as caught:
        pull_raw(pair, prompts(11, (40,))[0], priority=1.5)
    assert caught.value.reason == "protocol"
    assert pair.prefill_count("kv_export_held_bytes") == 0


class Flaky:
    """A listener that once cannot accept."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.failed = False

    def accept(self) -> Any:
        if not self.failed:
            self.failed = True
            raise OSError("too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_server_that_starts_refuses_at_once_and_can_be_stopped(pair: Pair) -> None:
    server = PrefillServer(PrefillSettings(port=0))
    listener: Any = Flaky(server._listener)
    server._listener = listener
    puller = Puller(("127.0.0.1", server.port), KVLayout.of(pair.decode.engine), "")
    for _ in range(3):  # the second of them while nothing can be accepted
        with pytest.raises(PullError, match="is starting") as caught:
            puller.pull(Wanted("r", (0,) * 40), 20.0, threading.Event())
        assert caught.value.reason == "unreachable"
    assert listener.failed
    server.stop()
    with pytest.raises(PullError):
        puller.pull(Wanted("r", (0,) * 40), 20.0, threading.Event())


def test_a_connection_without_a_thread_is_closed_and_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PrefillServer(PrefillSettings(port=0))
    make, failed = threading.Thread, threading.Event()

    def fail_once(*arguments: Any, **others: Any) -> threading.Thread:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        return make(*arguments, **others)

    monkeypatch.setattr(prefill_server, "threading", SimpleNamespace(Thread=fail_once))
    for refused in (False, True):
        channel = Channel(socket.create_connection(("127.0.0.1", server.port)), 60.0)
        if refused:
            assert channel.receive(Kind.REFUSE)[1]["reason"] == "starting"
        else:
            with pytest.raises(OSError):
                channel.receive(Kind.REFUSE)
        channel.close()
    assert failed.is_set()
    until(lambda: server._connections._value == prefill_server.MAX_CONNECTIONS, 10, "every place is free")
    server.stop()


def test_a_new_connection_takes_an_export_over(pair: Pair) -> None:
    """The old one is half open: nobody is at its other end any more, and this side has not seen that."""
    (prompt,) = prompts(18, (92,))
    old = begin_pull(pair, prompt, "half-open")
    new = begin_pull(pair, prompt, "half-open")
    with pytest.raises(OSError):
        while True:
            _, _, size = old.receive(Kind.BLOCK, Kind.WAIT, max_payload=1 << 20)
            old.read(size)
    _, fields, size = new.receive(Kind.BLOCK, max_payload=1 << 20)
    new.read(size)
    assert fields["index"] == 0
    new.send(Kind.DONE)
    new.close()
    old.close()


def test_what_waits_on_the_host_is_no_more_than_its_pages(pair: Pair) -> None:
    channel = begin_pull(pair, prompts(19, (40,))[0], "k")
    (export,) = pair.server._exports._by_key.values()
    until(lambda: export._ended is not None, 60, "the prompt is computed")
    held = sum(leaf.nbytes if leaf.base is None else leaf.base.nbytes for b in export._blocks for leaf in b.leaves)
    assert held == export.num_bytes
    channel.send(Kind.DONE)
    channel.close()


def test_one_that_is_done_and_closes_while_more_is_sent_to_it_holds_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed with bytes unread, its connection is reset: the server's next send fails before it has read the end."""
    closed, original = threading.Event(), PrefillServer._send_block
    failures: list[OSError] = []

    def send_block(self: PrefillServer, channel: Channel, export: Any, index: int, block: Any) -> None:
        if index:
            assert closed.wait(60)
        try:
            original(self, channel, export, index, block)
        except OSError as error:
            failures.append(error)
            raise

    monkeypatch.setattr(PrefillServer, "_send_block", send_block)
    channel = begin_pull(pair, prompts(38, (92,))[0], "done")
    channel._socket.settimeout(60)
    assert channel._socket.recv(1, socket.MSG_PEEK), "the first block has come"
    (export,) = pair.server._exports._by_key.values()
    until(lambda: export._ended is not None, 60, "all blocks are there")
    channel.send(Kind.DONE)
    channel.close()
    closed.set()
    until(lambda: not len(pair.server._exports), 3, "it is forgotten")
    assert len(failures) == 1


def test_half_a_page_is_refused(pair: Pair) -> None:
    with pytest.raises(PullError, match="38 tokens are asked for; they must be whole pages of 4"):
        pull_raw(pair, prompts(12, (38,))[0])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([Kind.AUTH, 0, 0, 0]) + b"\xff" * 12,
        bytes([Kind.PULL]) + bytes(15),
    ],
    ids=["http", "oversized", "out_of_order"],
)
def test_strangers_are_sent_away(pair: Pair, data: bytes) -> None:
    before = pair.prefill_count("kv_export_refused_total", reason="protocol")
    connection = socket.create_connection(("127.0.0.1", pair.server.port))
    channel = Channel(connection, 5.0)
    channel.receive(Kind.HELLO)
    connection.sendall(data)
    _, fields, _ = channel.receive(Kind.REFUSE)
    assert fields["reason"] == "protocol"
    assert pair.prefill_count("kv_export_refused_total", reason="protocol") - before == 1
    channel.close()


def begin_pull(pair: Pair, prompt: list[int], key: str = "k") -> Channel:
    """A connection that has asked and was accepted."""
    channel = Channel(socket.create_connection(("127.0.0.1", pair.server.port)), 60.0)
    _, hello, _ = channel.receive(Kind.HELLO)
    channel.send(Kind.AUTH, {"proof": proof("", hello["nonce"], "decode"), "nonce": "n"})
    channel.receive(Kind.PROOF)
    question = {"key": key, "first": 0, "request_id": f"of-{key}", "adapter": "", "tenant": "", "cache_salt": ""}
    question |= {"traceparent": "", "layout": hello["layout"]}
    channel.send(Kind.PULL, question, [memoryview(np.array(prompt, np.int32)).cast("B")])
    channel.receive(Kind.ACCEPT)
    return channel


@pytest.mark.parametrize("pair", [{"server": {"hold_s": 0.2}}], indirect=True)
def test_pages_that_nobody_comes_for_are_given_up(pair: Pair) -> None:
    before = pair.prefill_count("kv_export_expired_total")
    channel = begin_pull(pair, prompts(13, (40,))[0])
    assert pair.prefill_count("kv_export_held_bytes") > 0
    channel.close()
    until(lambda: pair.prefill_count("kv_export_expired_total") == before + 1, 10, "the export is given up")
    assert pair.prefill_count("kv_export_held_bytes") == 0


def test_only_a_window_of_blocks_is_on_its_way(pair: Pair) -> None:
    channel = begin_pull(pair, prompts(14, (92,))[0])

    def next_frame() -> int:
        kind, fields, size = channel.receive(Kind.BLOCK, Kind.WAIT, max_payload=1 << 20)
        channel.read(size)
        return int(fields["index"]) if kind is Kind.BLOCK else -1

    # 23 pages in chunks of 6 tokens' pages; the engine has computed them long before the window opens.
    until(lambda: not pair.prefill.engine.has_work, 60, "the prompt is computed")
    assert [next_frame() for _ in range(4)] == [0, 1, 2, 3]
    connection = channel._socket
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(60.0)
    channel.send(Kind.ACK, {"index": 0})
    assert next_frame() == 4
    channel.send(Kind.DONE)
    channel.close()


def test_an_acknowledgement_of_what_was_not_sent_is_refused(pair: Pair) -> None:
    channel = begin_pull(pair, prompts(15, (40,))[0])
    _, _, size = channel.receive(Kind.BLOCK, max_payload=1 << 20)
    channel.read(size)
    channel.send(Kind.ACK, {"index": 77})
    kind = None
    while kind is not Kind.REFUSE:
        kind, fields, size = channel.receive(Kind.BLOCK, Kind.REFUSE, Kind.END, max_payload=1 << 20)
        channel.read(size)
    assert "block 77 is acknowledged" in fields["message"]
    channel.close()


def test_an_error_of_its_own_is_told_and_logged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*of: Any) -> None:
        raise ZeroDivisionError("of a pull")

    monkeypatch.setattr(pair.server, "_answer", fails)
    refused = pair.prefill_count("kv_export_refused_total", reason="failed")
    with pytest.raises(PullError, match=r"refused \(failed\): the prefill server failed; its log") as caught:
        pull_raw(pair, prompts(12, (40,))[0])
    assert caught.value.reason == "refused"
    assert pair.prefill_count("kv_export_refused_total", reason="failed") == refused + 1
    assert any(each.exc_info and each.exc_info[0] is ZeroDivisionError for each in caplog.records)
    until(lambda: pair.server._connections._value == prefill_server.MAX_CONNECTIONS, 10, "every place is free")
