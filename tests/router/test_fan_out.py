"""Requests that concern every replica."""

from __future__ import annotations

from tests.router.scripts import BODY, refuse
from tests.server.running import error_of, until


def test_models_are_merged_and_routed_to_who_has_them(make_replica, make_router):
    replicas = [make_replica(refuse("200 OK", b"{}")) for _ in range(2)]
    replicas[1].models = ["m", "sql"]
    router = make_router(*replicas)
    with router.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["m", "sql"]
        for _ in range(3):
            client.post("/v1/completions", json=BODY | {"model": "sql"})
    assert [len(each.seen) for each in replicas] == [0, 3]


def test_load_is_summed(make_replica, make_router):
    replicas = [make_replica(), make_replica()]
    replicas[0].load, replicas[1].load = 3, 4
    router = make_router(*replicas)
    with router.client() as client:
        found = client.get("/load").json()
        assert (found["server_load"], found["num_replicas"]) == (7, 2)
        until(
            lambda: (
                [each["requests_from_others"] for each in client.get("/v1/router/replicas").json()["replicas"]]
                == [3, 4]
            ),
            5,
            "the load of others",
        )


def test_an_adapter_is_loaded_everywhere(make_replica, make_router):
    replicas = [make_replica(refuse("200 OK", b"Success")) for _ in range(2)]
    router = make_router(*replicas)
    with router.client() as client:
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/adapters/sql"})
    assert (answer.status_code, answer.text) == (200, "Success")
    assert [each.seen[0].path for each in replicas] == ["/v1/load_lora_adapter"] * 2


def test_replicas_that_disagree_are_named(make_replica, make_router):
    one = make_replica(refuse("200 OK", b"Success"))
    other = make_replica(refuse("400 Bad Request", b'{"error": {"message": "rank 64 is above max_lora_rank"}}'))
    router = make_router(one, other)
    with router.client() as client:
        error = error_of(client.post("/v1/load_lora_adapter", json={"lora_name": "sql"}), 500)
    assert error["code"] == "replicas_disagree"
    assert error["message"] == (
        f"replicas {one.name} did it, {other.name} did not; the first of these said 400: rank 64 is above max_lora_rank"
    )


def test_replicas_that_all_refuse_are_heard(make_replica, make_router):
    replicas = [make_replica(refuse("404 Not Found", b'{"error": {"message": "off"}}')) for _ in range(2)]
    router = make_router(*replicas)
    with router.client() as client:
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "off")


def test_an_emptied_prefix_cache_is_forgotten(make_replica, make_router):
    replicas = [make_replica(refuse("200 OK", b"{}")) for _ in range(2)]
    router = make_router(*replicas)
    with router.client() as client:
        client.post("/v1/completions", json=BODY | {"prompt": "x" * 640})
        assert router.metric("cache_table_blocks", replica=replicas[0].name) == 10
        assert client.post("/reset_prefix_cache", json={}).status_code == 200
        assert router.metric("cache_table_blocks", replica=replicas[0].name) == 0


def test_what_refuses_to_empty_its_prefix_cache_is_not_forgotten(make_replica, make_router):
    replica = make_replica(refuse("200 OK", b"{}"))
    router = make_router(replica)
    with router.client() as client:
        client.post("/v1/completions", json=BODY | {"prompt": "x" * 640})
        replica.script = refuse("404 Not Found")
        assert client.post("/reset_prefix_cache", json={}).status_code == 404
    assert router.metric("cache_table_blocks", replica=replica.name) == 10


def test_without_replicas_a_list_is_503(make_replica, make_router):
    replica = make_replica()
    router = make_router(replica)
    replica.ready = False
    router.until_up(0)
    with router.client() as client:
        assert error_of(client.get("/v1/models"), 503)["code"] == "no_replica"


def test_a_list_that_every_replica_refuses_is_the_first_one_s_refusal(make_replica, make_router):
    replicas = [make_replica(), make_replica()]
    router = make_router(*replicas)
    for each in replicas:
        each.lists = "401 Unauthorized"
    with router.client() as client:
        for path in ("/v1/models", "/v1/models/m"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (401, "no")
