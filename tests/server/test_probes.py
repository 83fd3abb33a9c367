"""Health, readiness, models, metrics, version, keys: what operators and clients look at first."""

import contextlib
import socket

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.core import NotReadyError
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of, metric_samples, until

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("state", ["loading", "warming_up"])
def test_while_loading_everything_but_health_is_503_with_progress(fake_server, fake_client, state):
    fake_server.engine.state = state
    fake_server.engine.progress = (3, 7, "warm-up: decode 8")
    ready = fake_client.get("/ready")
    assert ready.status_code == 503 and int(ready.headers["retry-after"]) >= 1
    assert ready.json()["progress"] == {"done": 3, "total": 7, "what": "warm-up: decode 8"}
    assert fake_client.get("/health").status_code == 200
    for response in (
        fake_client.post("/v1/completions", json=BODY),
        fake_client.post("/v1/chat/completions", json=BODY),
        fake_client.post("/tokenize", json=BODY),
        fake_client.get("/v1/models"),
    ):
        error = error_of(response, 503)
        assert error["code"] == state and "3 of 7" in error["message"]
        assert int(response.headers["retry-after"]) >= 1


def test_metrics_answer_before_there_is_an_engine(fake_server, fake_client):
    class Loading:
        @property
        def registry(self):
            raise NotReadyError("the model is loading")

    fake_server.engine.metrics = Loading()
    assert fake_client.get("/metrics").status_code == 200


def test_a_dead_engine_shows_in_health_and_fails_fast(fake_server, fake_client):
    fake_server.engine.state, fake_server.engine.error = "dead", RuntimeError("boom")
    assert fake_client.get("/health").status_code == 503
    assert fake_client.get("/ready").json()["error"] == "RuntimeError"
    response = fake_client.post("/v1/completions", json=BODY)
    assert error_of(response, 503)["code"] == "engine_dead"


def test_a_draining_server_refuses_new_requests(fake_server, fake_client):
    fake_server.engine.state = "draining"
    response = fake_client.post("/v1/completions", json=BODY)
    assert error_of(response, 503)["code"] == "draining" and "retry-after" in response.headers
    assert fake_client.get("/health").status_code == 200 and fake_client.get("/ready").status_code == 503


def test_the_real_engine_is_healthy_and_ready(client):
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").json() == {"ready": True, "state": "ready"}
    assert client.get("/version").json()["version"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/debug/state", "/nowhere"])
def test_head_is_answered_as_get_without_a_body(client, path):
    asked, got = client.head(path), client.get(path)
    assert (asked.status_code, asked.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    assert asked.content == b"" and client.get("/health").status_code == 200, "the connection is as before"


def test_head_of_what_is_only_posted_names_what_it_takes(client):
    answer = client.head("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_models_lists_the_served_one(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 128 and card["object"] == "model"
    assert client.get("/v1/models/tiny").json() == card
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(client):
    answer = client.post("/tokenize", json={"prompt": "Café 😊", "return_token_strs": True}).json()
    assert answer["tokens"] == list("Café 😊".encode()) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 128 and len(answer["token_strs"]) == answer["count"]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Café 😊"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["count"] > 1


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"messages": []}])
def test_tokenize_needs_exactly_one_input(client, body):
    error_of(client.post("/tokenize", json=body), 400)


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], [True], None])
def test_detokenize_refuses_what_is_no_token(client, tokens):
    assert "tokens" in error_of(client.post("/detokenize", json={"tokens": tokens}), 400)["param"]


def test_metrics_have_finite_values_and_the_project_prefix(client):
    client.post("/v1/completions", json=BODY)
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = dict(metric_samples(response.text))
    assert all(name.startswith("jaxserve:") and value >= 0 for name, value in found.items())
    assert found['jaxserve:generation_tokens_total{engine="0",model_name="tiny"}'] > 0


def test_metrics_compat_repeats_every_metric_under_vllms_prefix():
    server = RunningServer(FakeEngine, HttpSettings(metrics_compat="vllm"))
    try:
        with server.client() as client:
            names = [name for name, _ in metric_samples(client.get("/metrics").text)]
            openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    finally:
        server.stop()
    of_process = ("jaxserve:process_", "jaxserve:asyncio_")  # vLLM has none of these
    of_engine = [name for name in names if not name.startswith(of_process)]
    assert of_engine and all(name.replace("jaxserve:", "vllm:") in names for name in of_engine)
    assert openmetrics.text.endswith("# EOF\n")


@pytest.fixture(scope="module")
def locked_server():
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("secret"),)))
    yield server
    server.stop()


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "secret", "Basic secret", "Bearer", "Bearer secret2", "Bearer é"]
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/models",
        "/v1/embeddings",
        "/tokenize",
        "/tokenizer_info",
        "/load",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/openapi.json",
        "/nothing",
    ],
)
def test_without_the_key_nothing_but_the_probes_answers(locked_server, header, path):
    headers = {} if header is None else {"Authorization": header.encode()}
    with locked_server.client() as client:
        response = client.request("GET" if "models" in path else "POST", path, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key_everything_and_without_it_the_probes_answer(locked_server):
    with locked_server.client() as client:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert client.get(path).status_code == 200
        client.headers["Authorization"] = "Bearer secret"
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_metrics_tell_what_the_process_holds(client):
    found = dict(metric_samples(client.get("/metrics").text))
    labels = '{engine="0",model_name="tiny"}'
    assert found[f"jaxserve:process_resident_memory_bytes{labels}"] > 1e7
    files = found[f"jaxserve:process_open_fds{labels}"]
    assert found[f"jaxserve:process_threads{labels}"] >= 3 and found[f"jaxserve:asyncio_tasks{labels}"] >= 2
    port = client.base_url.port
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        name = f"jaxserve:process_open_fds{labels}"
        # Both ends are of this process.
        until(lambda: dict(metric_samples(client.get("/metrics").text))[name] >= files + 20)


def test_openmetrics_ends_once(client):
    text = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}).text
    assert text.count("# EOF") == 1 and text.endswith("# EOF\n") and "jaxserve:asyncio_tasks" in text


BODIES = {
    "/v1/completions": ({"prompt": ["a", "b"], "n": 3}, 6),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "n": 2}, 2),
    "/v1/responses": ({"input": "a", "n": "none"}, 1),
}


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("state", "reason"), [("draining", "draining"), ("stuck", "engine_stuck"), ("dead", "engine_dead")]
)
def test_each_choice_that_is_refused_before_the_engine_counts_once(fake_server, fake_client, route, state, reason):
    body, num_choices = BODIES[route]
    fake_server.engine.state = state
    response = fake_client.post(route, json=body | {"request_id": "my-req"})
    assert error_of(response, 503)["code"] == reason and response.headers["x-request-id"] == "my-req"
    assert fake_server.engine.metrics.reasons == [reason] * num_choices
    fake_client.post("/tokenize", json={"prompt": "a"})
    fake_client.get("/v1/models")
    assert len(fake_server.engine.metrics.reasons) == num_choices  # of requests for output alone
    fake_server.engine.state = "ready"


def test_what_a_starting_server_refuses_is_not_counted(fake_server, fake_client):
    fake_server.engine.state = "loading"
    assert error_of(fake_client.post("/v1/completions", json={"prompt": "a"}), 503)["code"] == "loading"
    assert fake_server.engine.metrics.reasons == []
    fake_server.engine.state = "ready"


@pytest.mark.parametrize("route", BODIES)
def test_a_fault_before_the_engine_has_id_route_and_count(fake_server, fake_client, route, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("broken")

    tokenizer = fake_server.engine.tokenizer
    monkeypatch.setattr(tokenizer, "encode", broken)
    monkeypatch.setattr(tokenizer, "encode_chat", broken)
    body, num_choices = BODIES[route]
    body = {name: value for name, value in body.items() if value != "none"} | {"request_id": "my-req"}
    response = fake_client.post(route, json=body)
    assert error_of(response, 500)["code"] == "internal_error" and response.headers["x-request-id"] == "my-req"
    assert fake_server.engine.metrics.reasons == ["error"] * num_choices
    said = [each.getMessage() for each in caplog.records if "unexpected" in each.getMessage()]
    assert said == [f"unexpected RuntimeError while answering POST {route}, request 'my-req'"]


def test_only_an_id_that_may_be_one_is_sent_back(fake_client):
    answer = fake_client.post("/v1/completions", json={"prompt": "a", "request_id": "a\r\nset-cookie: b"})
    assert error_of(answer, 400)["param"] == "request_id" and "x-request-id" not in answer.headers
