"""/openapi.json: every route and body, with ranges that the server keeps to."""

import jsonschema
import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.auth import PROBES
from jaxserve.server.description import ErrorAnswer
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of

ROUTES = {
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/responses"),
    ("post", "/v1/embeddings"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/tokenizer_info"),
    ("get", "/health"),
    ("get", "/ready"),
    ("get", "/metrics"),
    ("get", "/version"),
    ("get", "/load"),
    ("post", "/reset_prefix_cache"),
    ("post", "/start_profile"),
    ("post", "/stop_profile"),
    ("post", "/v1/load_lora_adapter"),
    ("post", "/v1/unload_lora_adapter"),
    ("get", "/debug/state"),
    ("get", "/debug/trace"),
}
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
WITH_BODY = (*GENERATION, "/tokenize", "/detokenize")
BEYOND = {"minimum": -1, "maximum": 1}


@pytest.fixture(scope="module")
def document(tiny_server):
    with tiny_server.client() as client:
        return client.get("/openapi.json").json()


def body_of(document, path):
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]


def success_of(document, method, path):
    return document["paths"][path][method]["responses"]["200"]["content"]


def test_every_route_is_described_with_the_errors_it_may_answer(document):
    operations = {(method, path): body for path, item in document["paths"].items() for method, body in item.items()}
    assert set(operations) == ROUTES
    for operation in operations.values():
        assert {"200", "4XX", "5XX"} <= set(operation["responses"])


@pytest.mark.parametrize("path", WITH_BODY)
def test_the_example_of_a_body_fits_its_schema_and_is_answered_as_described(document, client, path):
    content = body_of(document, path)
    body = content["examples"]["short"]["value"]
    jsonschema.Draft202012Validator(content["schema"]).validate(body)
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = success_of(document, "post", path)["application/json"]["schema"]
    jsonschema.validate(response.json(), answer)


@pytest.mark.parametrize(
    ("method", "path"), sorted(ROUTES - {("post", path) for path in (*WITH_BODY, "/v1/embeddings")})
)
def test_routes_without_a_body_answer_as_described(document, client, method, path):
    query = {"iterations": 1} if path == "/debug/trace" else {}  # without bounds: 400 of a server that keeps no trace
    response = client.request(method, path.replace("{model}", "tiny"), params=query)
    if "profile" in path or "lora" in path:  # off unless the server is told otherwise
        ErrorAnswer.model_validate_json(response.text, strict=True)
        return
    described = success_of(document, method, path)
    kind = response.headers["content-type"].partition(";")[0]
    assert response.status_code == 200 and kind in described
    if kind == "application/json":
        jsonschema.validate(response.json(), described[kind]["schema"])


def test_streams_are_described_and_parameters_are_named(document):
    for path in GENERATION:
        assert "text/event-stream" in success_of(document, "post", path)
    for path, names in {"/v1/models/{model}": ["model"], "/debug/trace": ["iterations", "seconds"]}.items():
        assert [given["name"] for given in document["paths"][path]["get"]["parameters"]] == names


def test_a_described_range_ends_where_the_server_refuses(document, client):
    """Just beyond each limit of a number: 400, naming the field."""
    tried = 0
    for path in GENERATION:
        content = body_of(document, path)
        for name, schema in content["schema"]["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                for limit in BEYOND.keys() & kind.keys():
                    body = content["examples"]["short"]["value"] | {name: kind[limit] + BEYOND[limit]}
                    error = error_of(client.post(path, json=body), 400)
                    if kind[limit] < 2**62:  # further integers are no JSON numbers here
                        assert name in error["message"]
                    tried += 1
    assert tried > 60


@pytest.mark.parametrize(
    "field",
    [
        {"n": 4}, {"temperature": 0}, {"temperature": 100}, {"top_p": 0}, {"top_p": 1}, {"top_k": -1},
        {"min_p": 1}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"presence_penalty": -2},
        {"frequency_penalty": 2}, {"logprobs": 20}, {"prompt_logprobs": 20}, {"seed": -(2**63)}, {"max_tokens": 0},
        {"priority": "high"}, {"priority": -(2**31)}, {"priority": 2**31 - 1}, {"logit_bias": {"263": 100}},
        {"truncate_prompt_tokens": -1}, {"stop_token_ids": [0]},
    ],
)  # fmt: skip
def test_a_value_on_a_described_limit_is_taken(document, client, field):
    body = body_of(document, "/v1/completions")
    jsonschema.Draft202012Validator(body["schema"]).validate(body["examples"]["short"]["value"] | field)
    response = client.post("/v1/completions", json=body["examples"]["short"]["value"] | field)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("guard_probes", [False, True])
def test_a_keyed_server_says_which_routes_need_a_key_and_those_do(guard_probes):
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("secret"),), guard_probes=guard_probes))
    try:
        with server.client() as client:
            document = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
            ((name, scheme),) = document["components"]["securitySchemes"].items()
            assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
            guarded = set()
            for method, path in ROUTES:
                security = document["paths"][path][method].get("security")
                assert security in (None, [{name: []}])
                refused = client.request(method, path).status_code == 401
                assert refused == (security is not None), path
                guarded |= {path} if refused else set()
    finally:
        server.stop()
    assert guarded == {path for _, path in ROUTES} - (set() if guard_probes else PROBES)


def test_an_open_server_asks_for_no_key(document):
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for item in document["paths"].values() for operation in item.values())


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_there_is_no_page_that_loads_scripts_from_elsewhere(client, path):
    error_of(client.get(path), 404)
