"""Requests on their way through: what reaches a replica, and what comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.doctor import main as doctor
from jaxserve.router.settings import HealthSettings, ProxySettings, RouterSettings
from jaxserve.top.__main__ import main as top
from tests.router.scripts import BODY, ROUND_ROBIN, refuse
from tests.router.upstreams import DONE, EVENT
from tests.server.running import error_of, raw_request, read_until, until


def test_a_stream_comes_through_byte_for_byte(make_replica, make_router):
    router = make_router(make_replica())
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.content == 3 * EVENT + DONE
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-request-id"] == "cmpl-1"


def test_events_are_not_held_back(make_replica, make_router):
    seen = threading.Event()

    async def waits_for_the_client(exchange):
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await asyncio.to_thread(seen.wait, 10)
        await exchange.chunk(DONE)
        await exchange.end_stream()

    router = make_router(make_replica(waits_for_the_client))
    with router.client() as client, client.stream("POST", "/v1/completions", json=BODY) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == EVENT
        seen.set()
        assert b"".join(pieces) == DONE


def test_an_event_cut_in_two_on_its_way_comes_whole(make_replica, make_router):
    async def cut(exchange):
        await exchange.begin_stream()
        for byte in EVENT + DONE:
            await exchange.chunk(bytes([byte]))
        await exchange.end_stream()

    router = make_router(make_replica(cut))
    with router.client() as client, client.stream("POST", "/v1/completions", json=BODY) as answer:
        pieces = list(answer.iter_raw())
    assert b"".join(pieces) == EVENT + DONE
    assert all(piece.endswith(b"\n\n") for piece in pieces)


def test_events_whose_lines_end_with_crlf_come_whole(make_replica, make_router):
    event = b'data: {"choices": []}\r\n\r\n'

    async def cut(exchange):
        await exchange.begin_stream()
        await exchange.chunk(event + event[:10])
        await asyncio.to_thread(seen.wait, 10)
        await exchange.chunk(event[10:])
        await exchange.end_stream()

    seen = threading.Event()
    router = make_router(make_replica(cut))
    with router.client() as client, client.stream("POST", "/v1/completions", json=BODY) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == event
        seen.set()
        assert b"".join(pieces) == event


@pytest.mark.parametrize("host", ["x/start_profile?", "a/..", "[", "x#", ""])
def test_a_host_header_changes_no_path(make_replica, make_router, host):
    replica = make_replica(refuse("200 OK", b"{}"))
    router = make_router(replica)
    with router.client() as client:
        assert client.post("/v1/completions?a=b", json=BODY, headers={"Host": host}).status_code == 200
        assert client.post("/reset_prefix_cache", json={}, headers={"Host": host}).status_code == 200
        assert error_of(client.get("/nothing", headers={"Host": host}), 404)["code"] == "path_not_found"
    assert [each.path for each in replica.seen] == ["/v1/completions?a=b", "/reset_prefix_cache"]


def test_method_path_query_headers_and_body_reach_the_replica(make_replica, make_router):
    replica = make_replica(refuse("200 OK", b"{}"))
    router = make_router(replica)
    headers = {
        "Authorization": "Bearer sk",
        "X-Tenant": "alice",
        "traceparent": "00-1",
        "Connection": "x-hop",
        "X-Hop": "1",
    }
    with router.client() as client:
        client.post("/v1/chat/completions?a=b%20c", json=BODY, headers=headers)
    (seen,) = replica.seen
    assert seen.head.startswith(b"POST /v1/chat/completions?a=b%20c HTTP/1.1\r\n")
    assert json.loads(seen.body) == BODY
    assert (seen.header("authorization"), seen.header("x-tenant"), seen.header("traceparent")) == (
        "Bearer sk",
        "alice",
        "00-1",
    )
    assert seen.header("host") == replica.name
    assert seen.header("x-hop") is None and seen.header("transfer-encoding") is None


@pytest.mark.parametrize(
    "status",
    [
        "400 Bad Request",
        "401 Unauthorized",
        "404 Not Found",
        "409 Conflict",
        "500 Internal Server Error",
        "504 Gateway Timeout",
    ],
)
def test_other_answers_are_passed_on_as_they_are(make_replica, make_router, status):
    one, other = make_replica(refuse(status, b'{"error": 1}', "X-Request-Id: r")), make_replica()
    router = make_router(one, other, settings=ROUND_ROBIN)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (int(status[:3]), b'{"error": 1}')
    assert answer.headers["x-request-id"] == "r"
    assert not other.seen


def test_a_client_that_leaves_ends_its_request_at_the_replica(make_replica, make_router):
    async def begins_and_waits(exchange):
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await replica.until_gone(exchange)

    replica = make_replica(begins_and_waits)
    router = make_router(replica)
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(raw_request("/v1/completions", BODY))
        read_until(connection, 1)
    assert replica.gone.wait(5), "the replica was not told"
    until(lambda: router.metric("client_disconnects_total") == 1, 5, "the count")


def test_a_client_that_leaves_before_the_answer_ends_its_request_too(make_replica, make_router):
    async def waits(exchange):
        await replica.until_gone(exchange)

    replica = make_replica(waits)
    router = make_router(replica)
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(raw_request("/v1/completions", BODY))
        until(lambda: replica.seen, 5, "the request at the replica")
    assert replica.gone.wait(5), "the replica was not told"


def test_a_slow_reader_holds_its_replica_back_and_not_the_router_s_memory(make_replica, make_router):
    sent = 0

    async def floods(exchange):
        nonlocal sent
        await exchange.begin_stream()
        while True:
            await exchange.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
            sent += 100_000

    router = make_router(make_replica(floods))
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(raw_request("/v1/completions", BODY))
        before = -1
        while sent != before:
            before = sent
            time.sleep(0.5)
        assert 0 < sent < 32 << 20
        with router.client() as client:
            assert client.get("/health").status_code == 200


def test_bodies_are_bounded_and_must_be_json_by_their_type(make_replica, make_router):
    replica = make_replica()
    router = make_router(replica, settings=RouterSettings(proxy=ProxySettings(max_body_bytes=100)))
    with router.client() as client:
        assert error_of(client.post("/v1/completions", json={"prompt": "x" * 100}), 413)["code"] == "body_too_large"
        assert error_of(client.post("/v1/completions", data={"a": "b"}), 415)["type"] == "invalid_request_error"
    assert not replica.seen


def test_heads_are_bounded(make_replica, make_router):
    replica = make_replica()
    router = make_router(replica)
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000)
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert not replica.seen


def test_what_is_no_json_is_for_the_replica_to_refuse(make_replica, make_router):
    replica = make_replica(refuse("400 Bad Request", b'{"error": {"code": "invalid_json"}}'))
    router = make_router(replica)
    with router.client() as client:
        for body in (b"{", b"[1]", b'{"prompt": [[]], "model": 5, "max_tokens": "x"}', b'{"messages": {"a": 1}}'):
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.json()["error"]["code"] == "invalid_json"
    assert [each.body for each in replica.seen][:2] == [b"{", b"[1]"]


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Content-Length: +5\r\n",
    ],
)
def test_ambiguous_framing_never_reaches_a_replica_as_two_requests(make_replica, make_router, head):
    replica = make_replica(refuse("200 OK", b"{}"))
    router = make_router(replica)
    smuggled = b"0\r\n\r\nPOST /start_profile HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(head.encode() + b"\r\n" + smuggled)
        connection.settimeout(0.5)
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            pass
    assert all(each.path == "/v1/completions" for each in replica.seen)
    for each in replica.seen:
        assert each.header("transfer-encoding") is None, "framing was copied"


@pytest.mark.parametrize("path", ["/", "/debug/state", "/debug/trace", "/start_profile", "/stop_profile"])
def test_what_is_of_one_replica_is_refused_saying_where(make_replica, make_router, path):
    replica = make_replica()
    router = make_router(replica)
    with router.client() as client:
        error = error_of(client.get(path), 404)
    assert error["code"] == "of_one_replica" and "/v1/router/replicas" in error["message"]
    assert not replica.seen


@pytest.mark.parametrize("state", ["ready", "no_replica", "draining"])
@pytest.mark.parametrize("command", [top, doctor])
def test_the_commands_that_look_at_a_server_send_to_its_replicas(make_replica, make_router, capsys, command, state):
    router = make_router(*([] if state == "no_replica" else [make_replica()]))
    if state == "draining":
        router.call(lambda: setattr(router.pool, "draining", True))
    with router.client() as client:
        assert client.get("/ready").json()["state"] == state
    assert command(["prog", f"--url={router.url}/"]) == 1
    where = f"ask a replica at its own address, as {router.url}/v1/router/replicas lists"
    assert capsys.readouterr() == ("", f"error: {router.url} is a router; {where}\n")


def test_unknown_paths_and_methods_reach_no_replica(make_replica, make_router):
    replica = make_replica()
    router = make_router(replica)
    with router.client() as client:
        assert error_of(client.get("/metrics/../debug"), 404)["code"] == "path_not_found"
        assert error_of(client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert not replica.seen


def test_keys_are_checked_and_passed_on(make_replica, make_router):
    replica = make_replica(refuse("200 OK", b"{}"))
    keys = (ApiKey("sk-operator"), ApiKey("sk-alice", "alice"))
    settings = RouterSettings(api_keys=keys, health=HealthSettings(0.05, 2.0, "sk-operator"))
    router = make_router(replica, settings=settings)
    with router.client() as client:
        assert error_of(client.post("/v1/completions", json=BODY), 401)["code"] == "invalid_api_key"
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        alice = {"Authorization": "Bearer sk-alice"}
        assert client.post("/v1/completions", json=BODY, headers=alice).status_code == 200
        assert error_of(client.get("/v1/router/replicas", headers=alice), 403)["code"] == "operator_key_needed"
        assert client.get("/v1/router/replicas", headers={"Authorization": "Bearer sk-operator"}).status_code == 200
    assert replica.seen[0].header("authorization") == "Bearer sk-alice"


def test_prompts_go_where_their_beginning_is(make_replica, make_router):
    replicas = [make_replica(refuse("200 OK", b"{}")) for _ in range(3)]
    router = make_router(*replicas)
    with router.client() as client:
        for user in "abc":
            messages = [{"role": "system", "content": user * 500}]
            for turn in range(3):
                messages += [
                    {"role": "user", "content": f"{user}{turn}" * 50},
                    {"role": "assistant", "content": "ok" * 40},
                ]
                client.post("/v1/chat/completions", json={"model": "m", "messages": messages[:-1]})
    assert sorted(len(each.seen) for each in replicas) == [3, 3, 3]
    for each in replicas:
        assert len({json.loads(seen.body)["messages"][0]["content"] for seen in each.seen}) == 1
    assert router.metric("choices_total", reason="prefix") == 6
    assert router.metric("matched_bytes_total") > 0.5 * router.metric("prompt_bytes_total")


def test_a_session_header_keeps_a_session_on_one_replica(make_replica, make_router):
    replicas = [make_replica(refuse("200 OK", b"{}")) for _ in range(2)]
    router = make_router(*replicas)
    with router.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json=BODY, headers={"X-Session-Id": "s"})
    assert sorted(len(each.seen) for each in replicas) == [0, 3]
