"""What clients see when replicas fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from jaxserve.router.settings import HealthSettings, ProxySettings, RouterSettings
from jaxserve.routing import BreakerSettings
from tests.router.scripts import BODY, ROUND_ROBIN, half_a_stream, headers_then_reset, refuse, reset
from tests.router.upstreams import DONE, EVENT
from tests.server.running import error_of, events_of, until


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


@pytest.mark.parametrize("status", ["504 Gateway Timeout", "501 Not Implemented", "503 Service Unavailable"])
def test_what_one_request_cannot_get_takes_no_replica_out(make_replica, make_router, status):
    one = make_replica(refuse(status, b'{"error": {"code": "prefill_unavailable"}}', "Retry-After: 3"))
    settings = RouterSettings(breaker=BreakerSettings(failure_threshold=1, open_s=30.0))
    router = make_router(one, settings=settings)
    with router.client() as client:
        for _ in range(3):
            answer = client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.headers["retry-after"]) == (int(status[:3]), "3")
            assert int(answer.headers["content-length"]) == len(answer.content)
        assert client.get("/v1/router/replicas").json()["replicas"][0]["reason"] is None
        until(lambda: client.get("/v1/router/replicas").json()["replicas"][0]["state"] == "up", 5, "in rotation")


@pytest.mark.parametrize("code", ["not_ready", "draining", "engine_dead", "engine_stuck"])
def test_a_replica_that_takes_no_requests_is_left_at_once(make_replica, make_router, code):
    async def ends(exchange):
        one.ready = False
        await exchange.answer(b'{"error": {"code": "%s"}}' % code.encode(), "503 Service Unavailable")

    one = make_replica(ends)
    router = make_router(one, settings=RouterSettings(health=HealthSettings(interval_s=30.0)))
    with router.client() as client:
        assert client.post("/v1/completions", json=BODY).json()["error"]["code"] == code
        assert error_of(client.post("/v1/completions", json=BODY), 503)["code"] == "no_replica"
    assert len(one.seen) == 1


def test_a_request_that_ends_replicas_is_given_to_one_other_only(make_replica, make_router):
    replicas = [make_replica(reset) for _ in range(4)]
    router = make_router(*replicas, settings=replace(ROUND_ROBIN, proxy=ProxySettings(max_retries=3)))
    with router.client() as client:
        assert error_of(client.post("/v1/completions", json=BODY), 503)["code"] == "replica_lost"
    assert sum(len(each.seen) for each in replicas) == 2
    assert router.metric("refused_total", code="replica_lost") == 1
    assert router.metric("prompt_bytes_total") <= len(BODY["prompt"]), "a prompt counts once"


def test_a_429_is_kept_though_the_other_replica_is_lost(make_replica, make_router):
    full = make_replica(refuse("429 Too Many Requests", b'{"error": {}}', "Retry-After: 7"))
    others = [make_replica(reset) for _ in range(2)]
    router = make_router(full, *others, settings=ROUND_ROBIN)
    with router.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert sum(len(each.seen) for each in others) == 1


def test_after_silence_no_other_replica_is_tried(make_replica, make_router):
    async def silent(exchange):
        await asyncio.sleep(20)

    one, other = make_replica(silent), make_replica()
    router = make_router(one, other, settings=replace(ROUND_ROBIN, proxy=ProxySettings(replica_timeout_s=0.2)))
    with router.client() as client:
        assert error_of(client.post("/v1/completions", json=BODY), 503)["code"] == "replica_lost"
    assert not other.seen


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


def test_a_probe_that_raises_takes_its_replica_out_and_the_others_are_probed_on(make_replica, make_router, caplog):
    one, other = make_replica(), make_replica()
    health = HealthSettings(interval_s=0.02, timeout_s=5.0)
    router = make_router(one, other, settings=replace(ROUND_ROBIN, health=health))
    tells, is_broken, probes = router.pool.tells, [True], []

    def tell(replica, **told):
        probes.append(replica.name)
        if replica.name == one.name and is_broken[0]:
            raise ZeroDivisionError("of what it told")
        tells(replica, **told)

    router.call(lambda: setattr(router.pool, "tells", tell))
    router.until_up(1)
    of_one, of_other = router.call(router.pool.view)
    assert of_one["reason"] == "probes got no answer: of what it told" and of_other["reason"] is None
    probes.clear()
    until(lambda: min(probes.count(one.name), probes.count(other.name)) > 2, what="both are probed on")
    is_broken[0] = False
    router.until_up(2)
    failed = [each for each in caplog.records if "could not be probed" in each.getMessage()]
    assert len(failed) == 1 and failed[0].exc_info[0] is ZeroDivisionError, "told once, however often it came"


def test_watching_a_client_that_fails_is_an_error_and_no_client_that_left(make_replica, make_router, monkeypatch):
    async def hang(exchange):
        await asyncio.sleep(30)

    async def fails(receive):
        raise ZeroDivisionError("of the connection")

    router = make_router(make_replica(hang))
    monkeypatch.setattr("jaxserve.router.proxy.disconnected", fails)
    with router.client() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 500
    assert router.metric("client_disconnects_total") == 0
