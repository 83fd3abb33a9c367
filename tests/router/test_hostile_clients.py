"""Smuggling and dawdling at the router: refused there, and no replica sees any of it."""

from __future__ import annotations

import socket
import time

import pytest

from jaxserve.server.bounded_http import HttpLimits
from tests.router.upstreams import RunningRouter
from tests.server.hostile import BODY, NOT_HTTP, SMUGGLING, answers, is_refused, statuses
from tests.server.running import until


@pytest.mark.parametrize("name", [*SMUGGLING, *NOT_HTTP])
def test_a_request_with_two_readings_reaches_no_replica(make_replica, make_router, name):
    replica = make_replica()
    router = make_router(replica)
    assert is_refused(router.port, (SMUGGLING | NOT_HTTP)[name])
    assert not [each for each in replica.seen if b"prompt" in each.body]


def test_a_request_that_passes_has_one_length_whatever_its_client_sent(make_replica, make_router):
    async def answer(exchange):
        await exchange.answer(b"{}")

    replica = make_replica(answer)
    router = make_router(replica)
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    assert statuses(answers(router.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)) == [200]
    (seen,) = replica.seen
    assert seen.body == BODY and seen.header("content-length") == str(len(BODY))
    assert seen.header("transfer-encoding") is None


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/completions HTTP/1.1\r\nX-A: a",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_a_client_that_dawdles_is_cut_off_in_time(make_replica, data):
    replica = make_replica()
    router = RunningRouter([replica.url], limits=HttpLimits(header_timeout_s=0.4, body_timeout_s=0.4))
    try:
        router.until_up(1)
        began = time.monotonic()
        assert statuses(answers(router.port, data)) == [408]
        assert 0.3 < time.monotonic() - began < 5 and not replica.seen
    finally:
        router.stop()


def test_beyond_the_limit_of_connections_probes_are_answered(make_replica):
    replica = make_replica()
    router = RunningRouter([replica.url], limits=HttpLimits(max_connections=5))
    try:
        router.until_up(1)
        full = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(5)]
        until(lambda: len(router._server.server_state.connections) == 5, what="connected")
        get = b"GET /%s HTTP/1.1\r\nHost: test\r\n\r\n"
        assert statuses(answers(router.port, get % b"health")) == [200]
        assert statuses(answers(router.port, get % b"v1/models")) == [503]
        for connection in full:
            connection.close()
    finally:
        router.stop()
