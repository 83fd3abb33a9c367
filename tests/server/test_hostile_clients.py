"""Clients that smuggle, dawdle, flood and break off: refused or ended, and everybody else is served as before."""

from __future__ import annotations

import gzip
import json
import os
import resource
import socket
import struct
import threading
import time

import pytest

from jaxserve.config.flags import parse_flags
from jaxserve.server.bounded_http import SPARE_CONNECTIONS, HttpLimits, http_limits
from tests.server.fake_engine import FakeEngine
from tests.server.hostile import BODY, FOLLOWING, NOT_HTTP, SMUGGLING, answers, is_refused, statuses
from tests.server.running import RunningServer, error_of, raw_request, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("name", SMUGGLING)
def test_a_request_with_two_readings_is_refused_and_its_connection_ends(server, name):
    assert is_refused(server.port, SMUGGLING[name])


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_not_http_1_is_refused_and_its_connection_ends(server, name):
    assert is_refused(server.port, NOT_HTTP[name])


def test_a_refusal_of_a_request_line_says_what_is_wrong(server):
    received = answers(server.port, SMUGGLING["two lengths"])
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http" and "length is given twice" in error["message"]


def test_the_server_is_as_before_after_all_of_them(server, alive):
    for data in (*SMUGGLING.values(), *NOT_HTTP.values()):
        answers(server.port, data + FOLLOWING)
    alive()


def test_requests_in_one_packet_are_answered_in_order(server):
    requests = [b"GET /%s HTTP/1.1\r\nHost: test\r\n\r\n" % path for path in (b"health", b"nowhere", b"version")]
    last = b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    assert statuses(answers(server.port, b"".join(requests) + raw_request("/v1/completions", {}) + last)) == [
        200,
        404,
        200,
        400,
        200,
    ]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (gzip.compress(BODY, mtime=0), {"Content-Encoding": "gzip"}, 415),
        (BODY, {"Content-Type": "text/plain"}, 415),
        (BODY, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (BODY, {"Content-Type": "multipart/form-data; boundary=x"}, 415),
        (BODY.decode().encode("utf-16"), {}, 400),
        (b"\xef\xbb\xbf" + BODY, {}, 400),
        (b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", {}, 400),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, {}, 400),
        (b'{"prompt": "\xc3\x28"}', {}, 400),
        (b'{"prompt": "\\udc00\\ud800"}', {}, 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}", {}, 400),
        (b'{"prompt": "a", "temperature": 1e' + b"9" * 5000 + b"}", {}, 400),
        (b'{"prompt": "a", "max_tokens": 1, "prompt": {}}', {}, 400),  # of two, the last one counts
        (b'{"prompt": {}, "max_tokens": 1, "prompt": "a"}', {}, 200),
        (b'{"prompt": "a", "max_tokens": 1}' + b" " * 100_000, {}, 200),
    ],
)  # fmt: skip
def test_api_3_bodies_that_are_not_what_they_say(client, alive, body, headers, status):
    """API-3 of bodies beyond `test_validation`'s: compressed, of other types and encodings, a million levels deep."""
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"} | headers)
    if status == 200:
        assert response.status_code == 200, response.text
    else:
        error_of(response, status)
    alive()


@pytest.fixture
def hasty():
    """A server that waits no longer than half a second for anything."""
    server = RunningServer(FakeEngine, limits=HttpLimits(header_timeout_s=0.5, body_timeout_s=0.5))
    yield server
    server.stop()


SLOW = {
    "nothing": (b"", []),
    "a head": (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 1000, [408]),
    "a body": (b"", [408]),
    "a chunked body": (b"5\r\nabcde\r\n" * 1000, [408]),
    "a body that nobody reads": (b"", [404]),
}


@pytest.mark.parametrize("what", SLOW)
def test_a_client_that_dawdles_is_cut_off_in_time(hasty, what):
    data, expected = SLOW[what]
    if what == "a body":
        data = HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 999
    elif what == "a chunked body":
        data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + data
    elif what == "a body that nobody reads":
        data = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + b" " * 999
    began = data.find(b"\r\n\r\n") + 4 if "body" in what else 0
    took, received = trickle_after(hasty.port, data[:began], data[began:])
    assert 0.3 < took < 5 and statuses(received) == expected


def trickle_after(port, first, rest):
    """`first` at once, then the rest a byte at a time."""
    began = time.monotonic()
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(first)
        connection.settimeout(0.05)
        sent = 0
        while time.monotonic() - began < 10:
            try:
                if sent < len(rest):
                    connection.sendall(rest[sent : sent + 1])
                    sent += 1
                chunk = connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not chunk:
                break
            received += chunk
    return time.monotonic() - began, received


def test_the_next_request_of_a_kept_connection_may_not_dawdle_either(hasty):
    took, received = trickle_after(
        hasty.port, b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n", b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 1000
    )
    assert statuses(received) == [200, 408] and took < 5


def test_waiting_for_an_answer_is_no_dawdling(hasty):
    hasty.call(hasty.engine.hold_off.clear)
    with socket.create_connection(("127.0.0.1", hasty.port)) as connection:
        connection.sendall(raw_request("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        time.sleep(1.2)
        hasty.call(hasty.engine.hold_off.set)
        connection.settimeout(10)
        assert statuses(connection.recv(65536)) == [200]


def test_others_are_served_beside_many_that_dawdle(hasty):
    slow = [socket.create_connection(("127.0.0.1", hasty.port)) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    with hasty.client() as client:
        began = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - began < 2
    until(lambda: not hasty._server.server_state.connections, 10, "all are ended")
    for connection in slow:
        connection.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_the_limit_of_connections_leaves_files_for_everything_else(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert HttpLimits().most == 768 - SPARE_CONNECTIONS
    assert HttpLimits(files_per_connection=2).most == 384 - SPARE_CONNECTIONS
    assert HttpLimits(max_connections=7).most == 7
    flags = parse_flags("server", ["server", "--max_connections=7", "--header_timeout_s=3", "--body_timeout_s=4"])
    assert http_limits(flags) == HttpLimits(3.0, 4.0, 7)


def test_beyond_the_limit_of_connections_probes_are_answered_and_others_told_so():
    server = RunningServer(FakeEngine, limits=HttpLimits(max_connections=10))
    try:
        full = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
        until(lambda: len(server._server.server_state.connections) == 10, what="connected")
        get = b"GET /%s HTTP/1.1\r\nHost: test\r\n\r\n"
        assert statuses(answers(server.port, get % b"health")) == [200]
        assert statuses(answers(server.port, raw_request("/v1/completions", {"prompt": "a"}))) == [503]
        received = answers(server.port, get % b"v1/models")
        assert statuses(received) == [503] and b"too_many_connections" in received and b"retry-after" in received
        more = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(SPARE_CONNECTIONS)]
        until(lambda: len(server._server.server_state.connections) == 10 + SPARE_CONNECTIONS, what="spare ones taken")
        assert answers(server.port, get % b"health") == b"", "the spare ones are taken too"
        for connection in more:
            connection.close()
        full.pop().close()
        until(lambda: len(server._server.server_state.connections) == 9, what="closed")
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        for connection in full:
            connection.close()
    finally:
        server.stop()


def test_thousands_of_connections_come_and_go(server, client, alive):
    """2,000, ended in every way, while /health is asked; afterwards no file is open that was not before."""
    client.get("/health")
    before, worst, stop = open_files(), 0.0, threading.Event()

    def probe():
        nonlocal worst
        with server.client() as other:
            while not stop.is_set():
                began = time.monotonic()
                assert other.get("/health").status_code == 200
                worst = max(worst, time.monotonic() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    for batch in range(20):
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for index, connection in enumerate(connections):
            if batch % 3 == 1:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"[: 10 + index])
            if batch % 3 == 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if index % 4 == 0:
                connection.shutdown(socket.SHUT_WR)
            connection.close()
    stop.set()
    thread.join(30)
    assert worst < 5
    until(lambda: len(server._server.server_state.connections) <= 1, 10, "all are gone")
    until(lambda: open_files() <= before + 1, 10, "files are closed")
    alive()


def test_abt_1_resets_in_the_middle_of_heads_bodies_and_answers_leave_nothing(server, alive):
    """ABT-1 of connections that break off anywhere; `test_abort` has those that leave during generation."""
    request = raw_request("/v1/completions", {"prompt": "The sea", "max_tokens": 60, "stream": True})
    for cut in (1, 20, 60, len(request) - 5, len(request)):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(request[:cut])
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: server.engine.engine.clean, 5, "idle-clean")
    alive()
