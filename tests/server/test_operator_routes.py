"""Load, prefix cache, profiles, the tokenizer's description, and what answers 405 and 501."""

import pytest

from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of, until

OPERATIONS = ("/reset_prefix_cache", "/start_profile", "/stop_profile")


def test_load_counts_what_runs_and_waits_and_falls_to_zero(server, client):
    engine = server.engine.engine
    idle = {"server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    assert client.get("/load").json() == idle
    engine.gate.clear()
    body = {"prompt": ["a"] * 3, "n": 2, "max_tokens": 90, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body), server.client() as other:
        until(lambda: engine.scheduler.num_running == 4, what="four slots are taken")
        load = other.get("/load").json()
        assert (load["server_load"], load["num_requests_running"], load["num_requests_waiting"]) == (6, 4, 2)
        assert load["kv_cache_usage_perc"] == 0, "no step ran yet"
    until(lambda: client.get("/load").json() == idle, 5, "load is 0")
    engine.gate.set()


def test_after_a_reset_nothing_is_found_in_the_prefix_cache(server, client):
    body = {"prompt": "forty characters of a prompt to be cached", "max_tokens": 2, "cache_salt": "reset"}

    def cached():
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 32)
    assert client.post("/reset_prefix_cache").json() == {"status": "ok"}
    assert cached() == 0


def test_the_tokenizer_describes_itself(client):
    info = client.get("/tokenizer_info").json()
    assert info["model_max_length"] == 128 and info["chat_template"] and info["vocab_size"] >= 256
    assert info["eos_token_id"] in info["eos_token_ids"]
    for name in ("bos", "eos"):
        ids = client.post("/tokenize", json={"prompt": info[f"{name}_token"], "add_special_tokens": False}).json()
        assert ids["tokens"] == [info[f"{name}_token_id"]], "its text is its token"
        assert info["special_tokens"][str(info[f"{name}_token_id"])] == info[f"{name}_token"]


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_without_a_folder_profiles_are_refused_naming_the_flag(fake_server, fake_client, path):
    error = error_of(fake_client.post(path), 400)
    assert error["code"] == "profiling_off" and "--profile_dir" in error["message"]
    assert not fake_server.engine.profiles


def test_a_profile_starts_once_and_stops_once():
    server = RunningServer(FakeEngine, HttpSettings(profile_dir="/profiles"))
    try:
        with server.client() as client:
            assert error_of(client.post("/stop_profile"), 409)["code"] == "no_profile"
            assert client.post("/start_profile").json() == {"status": "started", "profile_dir": "/profiles"}
            assert error_of(client.post("/start_profile"), 409)["code"] == "profile_running"
            assert client.post("/stop_profile").json()["status"] == "stopped"
            assert server.engine.profiles == ["/profiles", "stopped"]
    finally:
        server.stop()


def test_the_real_engine_writes_a_profile(server, tmp_path):
    server.engine.start_profile(str(tmp_path))
    try:
        with server.client() as client:
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    finally:
        server.engine.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("state", ["loading", "dead"])
@pytest.mark.parametrize("path", ["/load", "/tokenizer_info", *OPERATIONS])
def test_without_a_model_they_are_unavailable(fake_server, fake_client, path, state):
    fake_server.engine.state = state
    error_of(fake_client.request("POST" if path in OPERATIONS else "GET", path), 503)


def test_while_draining_the_load_is_still_told(fake_server, fake_client):
    fake_server.engine.state = "draining"
    assert fake_client.get("/load").json()["server_load"] == 0
    error_of(fake_client.post("/reset_prefix_cache"), 503)


def test_embeddings_are_a_clear_501(fake_client):
    error = error_of(fake_client.post("/v1/embeddings", json={"input": "a"}), 501)
    assert error["code"] == "not_implemented" and "embeddings" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(("GET", path, "POST") for path in ("/v1/completions", "/v1/embeddings", "/tokenize", *OPERATIONS)),
        *(("POST", path, "GET") for path in ("/v1/models", "/health", "/metrics", "/load", "/tokenizer_info")),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/models/fake", "GET"),
    ],
)
def test_another_method_is_a_405_that_names_the_right_one(fake_client, method, path, allowed):
    response = fake_client.request(method, path)
    error = error_of(response, 405)
    assert error["code"] == "method_not_allowed" and method in error["message"] and allowed in error["message"]
    assert response.headers["allow"] == allowed
