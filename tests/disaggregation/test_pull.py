"""A decode server's side of the page stream, against prefill servers that keep to the protocol and that do not."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.disaggregation import pull as pull_module
from jaxserve.disaggregation.frames import VERSION, Channel, Kind, checksum, proof
from jaxserve.disaggregation.kv_layout import KVLayout, as_bytes
from jaxserve.disaggregation.pull import Puller, PullError, Wanted

LAYOUT = KVLayout("tiny", "0123", 4, (0, 6), ("float32[2,1,2,1,4,8]", "float32[2,1,2,1,4]"))
TOKEN = "a token of the tests"
PROMPT = tuple(range(160))
PLACES = [(0, 0, 16), (0, 16, 8), (0, 24, 16), (1, 38, 2)]
"""Group, first page and count of each block: 40 pages of the group that sees all, 2 of that with a window."""
Handler = Callable[["Server", Channel, int, dict[str, Any]], None]


def pages_of(index: int) -> list[np.ndarray]:
    """The arrays of a block, full of numbers that no other has."""
    arrays = LAYOUT.empty(PLACES[index][2])
    for number, array in enumerate(arrays):
        array[...] = np.arange(array.size).reshape(array.shape) + 1000 * index + number
    return arrays


class Server:
    """Greets each connection, then does with it what `handler` says; connections are counted from 0."""

    def __init__(self, handler: Handler, *, token: str = TOKEN, hello: dict[str, Any] | None = None) -> None:
        self._handler, self._token, self._hello = handler, token, hello or {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self.num_connections = 0
        self.acknowledged: list[int] = []
        self.done = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            number, self.num_connections = self.num_connections, self.num_connections + 1
            threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        channel = Channel(connection, 5.0)
        try:
            hello = {"version": VERSION, "nonce": "n", "layout": LAYOUT.to_json(), "max_tokens": 1000}
            channel.send(Kind.HELLO, hello | self._hello)
            _, fields, _ = channel.receive(Kind.AUTH)
            channel.send(Kind.PROOF, {"proof": proof(self._token, fields["nonce"], "prefill")})
            _, question, size = channel.receive(Kind.PULL, max_payload=4 * len(PROMPT))
            assert np.frombuffer(channel.read(size), np.int32).tolist() == list(PROMPT)
            channel.send(Kind.ACCEPT, {"transport": "stream"})
            self._handler(self, channel, number, question)
        except OSError:
            pass
        finally:
            channel.close()

    def blocks(self, channel: Channel, first: int, end: int = len(PLACES)) -> None:
        """Sends blocks, each acknowledged before the next."""
        for index in range(first, end):
            self.block(channel, index)
            self.acknowledged.append(channel.receive(Kind.ACK)[1]["index"])

    def block(self, channel: Channel, number: int, **changes: int) -> None:
        """Sends one block, some of whose fields are not true."""
        group, first, count = PLACES[number]
        parts = as_bytes(pages_of(number))
        crc = checksum(number, group, first, count, parts)
        fields = {"index": number, "group": group, "first": first, "count": count, "crc": crc} | changes
        channel.send(Kind.BLOCK, fields, parts)

    def end(self, channel: Channel) -> None:
        """Ends a pull well."""
        channel.send(Kind.END, {"blocks": len(PLACES)})
        channel.receive(Kind.DONE)
        self.done.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """`serve(handler, ...)`: a server; waits are short."""
    monkeypatch.setattr(pull_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(pull_module, "SILENCE_S", 2.0)
    servers: list[Server] = []

    def make(handler: Handler, **others: Any) -> Server:
        servers.append(Server(handler, **others))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def pull(server: Server, *, timeout_s: float = 20.0, layout: KVLayout = LAYOUT) -> tuple[list[Any], int]:
    """The blocks that come, and how often it went on."""
    resumed: list[None] = []
    puller = Puller(server.address, layout, TOKEN)
    blocks = puller.pull(Wanted("r", PROMPT), timeout_s, threading.Event(), lambda: resumed.append(None))
    return blocks, len(resumed)


def assert_right(blocks: list[Any]) -> None:
    assert [(block.group, block.first, block.count) for block in blocks] == PLACES
    for index, block in enumerate(blocks):
        for came, sent in zip(block.leaves, pages_of(index), strict=True):
            np.testing.assert_array_equal(came, sent)


def well(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
    server.blocks(channel, question["first"])
    server.end(channel)


def test_blocks_come_as_they_are_and_each_is_acknowledged(serve: Callable[..., Server]) -> None:
    server = serve(well)
    blocks, resumed = pull(server)
    assert_right(blocks)
    assert (resumed, server.acknowledged) == (0, [0, 1, 2, 3]) and server.done.wait(5)


def cut(server: Server, channel: Channel) -> None:
    """Ends in the middle of block 2."""
    parts = as_bytes(pages_of(2))
    fields = {"index": 2, "group": 0, "first": 24, "count": 16, "crc": 0}
    whole = [parts[0][: len(parts[0]) // 2]]
    channel._socket.sendall(_head(fields, sum(map(len, parts))))
    channel._socket.sendall(whole[0])


def _head(fields: dict[str, Any], size: int) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack(">BxxxIQ", Kind.BLOCK, len(text), size) + text


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda server, channel: server.block(channel, 2, crc=1), id="corrupted"),
        pytest.param(cut, id="truncated"),
        pytest.param(lambda server, channel: None, id="lost"),
    ],
)
def test_a_damaged_or_lost_block_is_asked_for_again(serve: Callable[..., Server], fault: Any) -> None:
    asked: list[int] = []

    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        asked.append(question["first"])
        if number:
            return well(server, channel, number, question)
        server.blocks(channel, 0, 2)
        fault(server, channel)

    server = serve(handler)
    blocks, resumed = pull(server)
    assert_right(blocks)
    assert (asked, resumed, server.acknowledged) == ([0, 2], 1, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"index": 3}, "block 3 came; 2 was to come"),
        ({"index": 1}, "block 1 came; 2 was to come"),
        ({"group": 2}, "is of group 2; there are 2"),
        ({"group": -1}, "is of group -1; there are 2"),
        ({"first": 25}, "16 pages from 25 on of group 0; 24 was to come, of 40"),
        ({"first": 8}, "16 pages from 8 on of group 0; 24 was to come"),
        ({"count": 17}, "17 pages from 24 on"),
        ({"count": 0}, "0 pages from 24 on"),
        ({"count": 15}, "15 pages have"),
        ({"crc": 7}, "block 2 is damaged: its checksum differs"),
    ],
)
def test_what_is_not_of_the_prompt_is_never_taken(
    serve: Callable[..., Server], fault: dict[str, int], message: str
) -> None:
    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        server.blocks(channel, question["first"], 2)
        server.block(channel, 2, **fault)
        channel.receive(Kind.ACK)

    server = serve(handler)
    with pytest.raises(PullError, match=message) as caught:
        pull(server)
    assert caught.value.reason == "protocol"
    assert server.num_connections == pull_module.MAX_RESUMES + 1 and server.acknowledged == [0, 1]


def test_a_payload_beyond_a_block_is_refused_before_memory_is_taken(serve: Callable[..., Server]) -> None:
    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        channel._socket.sendall(_head({"index": 0}, 1 << 50))
        channel.receive(Kind.ACK)

    with pytest.raises(PullError, match="payload of a BLOCK has 1125899906842624 bytes; the limit is") as caught:
        pull(serve(handler))
    assert caught.value.reason == "protocol"


@pytest.mark.parametrize("kind", [99, Kind.AUTH])
def test_a_frame_out_of_place_is_refused(serve: Callable[..., Server], kind: int) -> None:
    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        channel._socket.sendall(bytes([kind]) + bytes(15))
        channel.receive(Kind.ACK)

    with pytest.raises(PullError, match="BLOCK or WAIT or END or REFUSE was expected"):
        pull(serve(handler))


def test_an_end_with_pages_missing_is_none(serve: Callable[..., Server]) -> None:
    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        server.blocks(channel, question["first"], 3)
        channel.send(Kind.END)
        channel.receive(Kind.DONE)

    with pytest.raises(PullError, match="the end came after 3 blocks, with pages missing"):
        pull(serve(handler))


def test_who_does_not_know_the_token_is_not_believed(serve: Callable[..., Server]) -> None:
    server = serve(well, token="another token altogether")
    with pytest.raises(PullError, match="does not know the token") as caught:
        pull(server)
    assert caught.value.reason == "token" and server.num_connections == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "9"}, "the models differ: 'tiny' here, 'tiny' there, or other weights"),
        ({"page_size": 8}, "page_size is 4 here and 8 there; set --page_size alike"),
        ({"windows": (0,)}, r"windows is \(0, 6\) here and \(0,\) there"),
        ({"leaves": ("int8[2,1,2,1,4,8]",)}, "leaves is .* set --dtype, --kv_cache_dtype"),
    ],
)
def test_another_layout_is_refused_and_the_difference_named(
    serve: Callable[..., Server], change: dict[str, Any], message: str
) -> None:
    server = serve(well, hello={"layout": replace(LAYOUT, **change).to_json()})
    with pytest.raises(PullError, match=message) as caught:
        pull(server)
    assert caught.value.reason == "layout" and server.num_connections == 1


@pytest.mark.parametrize(
    ("hello", "reason", "message"),
    [
        ({"version": 2}, "protocol", "speaks version 2, this server 1"),
        ({"max_tokens": 159}, "refused", "takes 159 tokens; the prompt has 160"),
        ({"layout": {"model": "tiny"}}, "protocol", "not a K/V layout"),
    ],
)
def test_a_greeting_that_does_not_fit_is_refused(
    serve: Callable[..., Server], hello: dict[str, Any], reason: str, message: str
) -> None:
    with pytest.raises(PullError, match=message) as caught:
        pull(serve(well, hello=hello))
    assert caught.value.reason == reason


def test_nobody_there(serve: Callable[..., Server]) -> None:
    server = serve(well)
    server.close()
    with pytest.raises(PullError) as caught:
        pull(server)
    assert caught.value.reason == "unreachable"


def test_a_server_that_falls_silent_is_given_up(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "SILENCE_S", 0.05)
    released = threading.Event()

    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        released.wait(600)

    with pytest.raises(PullError, match="timed out") as caught:
        pull(serve(handler))
    released.set()
    assert caught.value.reason == "unreachable"


def test_a_server_that_does_not_greet_is_not_asked_again(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = ("127.0.0.1", int(hung.getsockname()[1]))
        with pytest.raises(PullError, match="does not answer") as caught:
            Puller(address, LAYOUT, TOKEN).pull(Wanted("r", PROMPT), 20.0, threading.Event())
        assert caught.value.reason == "unreachable"
        hung.setblocking(False)
        hung.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hung.accept()


def test_a_server_that_only_waits_is_given_up_in_time_and_told(serve: Callable[..., Server]) -> None:
    told = threading.Event()

    def handler(server: Server, channel: Channel, number: int, question: dict[str, Any]) -> None:
        for _ in range(1000):
            channel.send(Kind.WAIT)
            channel._timeout_s = 0.02
            try:
                channel.receive(Kind.DONE)
            except TimeoutError:
                continue
            told.set()
            return

    server = serve(handler)
    with pytest.raises(PullError, match="did not compute the prompt in time") as caught:
        pull(server, timeout_s=0.2)
    assert caught.value.reason == "timeout" and told.wait(5) and server.num_connections == 1


def test_pages_are_counted_by_group() -> None:
    assert LAYOUT.first_pages(160) == [0, 38] and LAYOUT.num_pages(160) == 42
    assert LAYOUT.page_bytes == 2 * 2 * 4 * 8 * 4 + 2 * 2 * 4 * 4
