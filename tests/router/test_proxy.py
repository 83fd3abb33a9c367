"""Requests on their way through: what reaches a replica, and what comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.router.settings import HealthSettings, ProxySettings, RouterSettings
from jaxserve.routing import BreakerSettings, RoutingSettings
from tests.router.upstreams import DONE, EVENT
from tests.server.running import error_of, events_of, raw_request, read_until, until

BODY = {"model": "m", "prompt": "The sea is wide", "max_tokens": 4, "stream": True}
ROUND_ROBIN = RouterSettings(routing=RoutingSettings(policy="round_robin"))


def refuse(status, body=b'{"error": {"message": "no"}}', *headers):
    async def script(exchange):
        await exchange.answer(body, status, *headers)

    return script


async def reset(exchange):
    exchange.reset()


async def headers_then_reset(exchange):
    await exchange.begin_stream()
    exchange.reset()


async def half_a_stream(exchange):
    await exchange.begin_stream()
    await exchange.chunk(EVENT)
    await exchange.chunk(EVENT + EVENT[:20])
    await asyncio.sleep(0.1)  # a reset may overtake what was sent just before it
    exchange.reset()


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


@pytest.mark.parametrize("script", [reset, headers_then_reset, refuse("503 Service Unavailable")])
def test_a_request_that_no_byte_was_sent_of_is_given_to_another(make_replica, make_router, script):
    one, other = make_replica(script), make_replica()
    router = make_router(one, other, settings=ROUND_ROBIN)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.content == 3 * EVENT + DONE
    assert [len(each.seen) for each in (one, other)] == [1, 1]
    reason = "unavailable" if script not in (reset, headers_then_reset) else "lost"
    assert router.metric("retries_total", reason=reason) == 1


def test_a_whole_answer_that_broke_off_is_asked_of_another(make_replica, make_router):
    async def half(exchange):
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        exchange.reset()

    router = make_router(make_replica(half), make_replica(refuse("200 OK", b"{}")), settings=ROUND_ROBIN)
    with router.client() as client:
        assert client.post("/v1/completions", json=BODY).content == b"{}"


def test_a_dead_replica_is_left_at_once_and_comes_back(make_replica, make_router):
    one, other = make_replica(), make_replica()
    router = make_router(one, other, settings=ROUND_ROBIN)
    one.die()
    with router.client() as client:
        for _ in range(4):
            assert client.post("/v1/completions", json=BODY).content == 3 * EVENT + DONE
        assert len(other.seen) == 4
        router.until_up(1)
        one.listen()
        router.until_up(2)
        states = {each["replica"]: each["state"] for each in client.get("/v1/router/replicas").json()["replicas"]}
        assert states == {one.name: "half_open", other.name: "up"}
        for _ in range(2):
            client.post("/v1/completions", json=BODY)
        states = {each["replica"]: each["state"] for each in client.get("/v1/router/replicas").json()["replicas"]}
        assert states == {one.name: "up", other.name: "up"}
    assert len(one.seen) == 1


def test_a_stream_that_had_begun_ends_with_an_error_event_that_names_the_replica(make_replica, make_router):
    one, other = make_replica(half_a_stream), make_replica()
    router = make_router(one, other, settings=ROUND_ROBIN)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    *events, last = events_of(answer.text)
    assert answer.content.startswith(2 * EVENT) and len(events) == 2, "half of an event was sent"
    assert last["error"]["code"] == "replica_lost" and last["error"]["type"] == "service_unavailable_error"
    assert f"replica {one.name} was lost in the middle of the answer" in last["error"]["message"]
    assert not other.seen
    assert router.metric("streams_broken_total", replica=one.name) == 1


def test_a_full_queue_tries_one_other_and_then_says_so(make_replica, make_router):
    full = refuse("429 Too Many Requests", b'{"error": {"code": "queue_full_requests"}}', "Retry-After: 7")
    replicas = [make_replica(full) for _ in range(3)]
    router = make_router(*replicas, settings=ROUND_ROBIN)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["code"] == "queue_full_requests"
    assert sum(len(each.seen) for each in replicas) == 2
    assert len(router.call(lambda: router.pool.in_rotation)) == 3, "a full replica is not a sick one"


def test_retries_are_bounded(make_replica, make_router):
    replicas = [make_replica(reset) for _ in range(4)]
    router = make_router(*replicas, settings=replace(ROUND_ROBIN, proxy=ProxySettings(max_retries=1)))
    with router.client() as client:
        error = error_of(client.post("/v1/completions", json=BODY), 503)
    assert error["code"] == "replica_lost" and "before it answered" in error["message"]
    assert sum(len(each.seen) for each in replicas) == 2


def test_no_replica_is_503_with_retry_after(make_replica, make_router):
    replica = make_replica()
    replica.ready = False
    router = make_router(replica, up=0)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
        assert error_of(answer, 503)["code"] == "no_replica"
        assert answer.headers["retry-after"] == "2"
        assert client.get("/health").status_code == 503
        until(
            lambda: "warming up" in client.get("/v1/router/replicas").json()["replicas"][0]["reason"], 5, "the reason"
        )
        replica.ready = True
        router.until_up(1)
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_failed_requests_in_a_row_open_the_circuit(make_replica, make_router):
    one = make_replica(refuse("500 Internal Server Error"))
    settings = RouterSettings(breaker=BreakerSettings(failure_threshold=2, open_s=30.0))
    router = make_router(one, settings=settings)
    with router.client() as client:
        assert [client.post("/v1/completions", json=BODY).status_code for _ in range(3)] == [500, 500, 503]
        assert "it answered 500" in client.get("/v1/router/replicas").json()["replicas"][0]["reason"]


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


def test_a_silent_replica_is_given_up(make_replica, make_router):
    async def silent(exchange):
        await asyncio.sleep(20)

    router = make_router(make_replica(silent), settings=RouterSettings(proxy=ProxySettings(replica_timeout_s=0.2)))
    with router.client() as client:
        assert error_of(client.post("/v1/completions", json=BODY), 503)["code"] == "replica_lost"


def test_requests_that_wait_for_a_hanging_replica_are_given_to_another(make_replica, make_router):
    async def hangs(exchange):
        hanging.hangs = True
        await asyncio.sleep(30)

    hanging, other = make_replica(hangs), make_replica()
    settings = replace(
        ROUND_ROBIN,
        health=HealthSettings(interval_s=0.05, timeout_s=0.1),
        breaker=BreakerSettings(probe_failure_threshold=2),
    )
    router = make_router(hanging, other, settings=settings)
    with router.client() as client:
        assert client.post("/v1/completions", json=BODY, timeout=10).content == 3 * EVENT + DONE
    assert len(hanging.seen) == len(other.seen) == 1
    assert "probes got no answer" in router.call(lambda: router.pool.replicas[0].breaker.reason)


def test_a_stream_that_has_begun_outlasts_unanswered_probes(make_replica, make_router):
    async def slow(exchange):
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        replica.hangs = True
        await asyncio.to_thread(router.until_up, 0)
        await exchange.chunk(DONE)
        await exchange.end_stream()

    replica = make_replica(slow)
    settings = RouterSettings(
        health=HealthSettings(interval_s=0.05, timeout_s=0.1), breaker=BreakerSettings(probe_failure_threshold=2)
    )
    router = make_router(replica, settings=settings)
    with router.client() as client:
        assert client.post("/v1/completions", json=BODY).content == EVENT + DONE


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


def test_what_is_left_after_draining_ends_with_an_error(make_replica, make_router):
    async def begins_and_waits(exchange):
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await replica.until_gone(exchange)

    replica = make_replica(begins_and_waits)
    router = make_router(replica)

    def cut():
        from jaxserve.server.errors import ApiError

        for answer in tuple(router.app.active):
            answer.cut_short(ApiError("unavailable", "the router shut down", code="draining"))

    with httpx.Client(base_url=router.url, timeout=10) as client:
        with client.stream("POST", "/v1/completions", json=BODY) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == EVENT
            router.call(lambda: setattr(router.pool, "draining", True))
            assert error_of(client.post("/v1/completions", json=BODY), 503)["code"] == "draining"
            assert client.get("/ready").json()["state"] == "draining"
            router.call(cut)
            assert events_of(b"".join(pieces).decode())[-1]["error"]["code"] == "draining"
        assert replica.gone.wait(5)
