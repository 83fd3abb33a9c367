"""Bad requests get a 4xx that names field, rule and value, and leave the server as it was."""

import json
import socket

import pytest

from jaxserve.testing.tiny import NUM_BYTES
from tests.server.running import error_of, raw_request, strict_json

VOCAB_SIZE = 264


def post(client, body, path="/v1/completions"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1], [2**31], [1.5], [True], [5, "a"], [[1], [VOCAB_SIZE]]])
def test_a_prompt_id_outside_the_vocabulary_is_refused(client, alive, ids):
    """API-1."""
    error = error_of(post(client, {"prompt": ids}), 400)
    assert error["param"] == "prompt"
    alive()


@pytest.mark.parametrize("key", [str(VOCAB_SIZE), "-1", "x", "1.5", "9" * 30])
def test_a_logit_bias_key_that_is_no_token_is_refused(client, alive, key):
    """API-1."""
    error = error_of(post(client, {"prompt": "a", "logit_bias": {key: 5}}), 400)
    assert "logit_bias" in error["message"]
    alive()


MALFORMED = {
    "prompt is missing": b"{}",
    "prompt is null": b'{"prompt": null}',
    "no prompts": b'{"prompt": []}',
    "empty prompt": b'{"prompt": ""}',
    "empty ids": b'{"prompt": [[]]}',
    "mixed prompts": b'{"prompt": ["a", 1]}',
    "prompt is an object": b'{"prompt": {"a": 1}}',
    "lone surrogate": b'{"prompt": "\\ud83d"}',
    "bad UTF-8": b'{"prompt": "\xff"}',
    "deep nesting": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "an array": b"[]",
    "nothing": b"",
    "cut off": b'{"prompt": "a"',
    "trailing text": b'{"prompt": "a"} x',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_body_is_refused_before_any_stream_begins(client, alive, body, stream):
    """API-3; `test_hostile_clients` has more bodies."""
    if stream and body.startswith(b"{") and len(body) > 2:
        body = b'{"stream": true, ' + body[1:]
    response = post(client, body)
    error_of(response, 400)
    assert response.headers["content-type"] == "application/json"
    alive()


MALFORMED_CONTENT = {
    "lone surrogate": b'"\\ud83d"',
    "bad UTF-8": b'"\xff"',
    "deep nesting": b"[" * 5000 + b"]" * 5000,
    "a number": b"5",
    "a list of nothing": b"[null]",
}


@pytest.mark.parametrize("content", MALFORMED_CONTENT.values(), ids=MALFORMED_CONTENT.keys())
@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_malformed_content_of_a_message_is_refused_before_any_stream_begins(client, alive, content, stream):
    """API-3."""
    body = b'{"stream": %s, "messages": [{"role": "user", "content": %s}]}' % (stream, content)
    response = post(client, body, "/v1/chat/completions")
    error_of(response, 400)
    assert response.headers["content-type"] == "application/json"
    alive()


@pytest.mark.parametrize("messages", [[], None, ["a"], [{"role": "user"}], [{"role": "robot", "content": "a"}], "a"])
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_messages_are_refused(client, messages, stream):
    """API-3."""
    body = {"messages": messages, "stream": stream}
    error = error_of(post(client, body, "/v1/chat/completions"), 400)
    assert error["param"] == "messages"


def test_null_means_the_default_for_every_field(client):
    """API-3: and empty content is taken."""
    schema = client.get("/openapi.json").json()["paths"]
    for path, required in (
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "max_tokens": 3}),
    ):
        fields = schema[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        nulls = {name: None for name in fields} | {"tools": None, "suffix": None, "response_format": None}
        response = client.post(path, json=nulls | required | {"temperature": 0})
        assert response.status_code == 200, response.text
        plain = client.post(path, json=required | {"temperature": 0}).json()
        assert response.json()["choices"] == plain["choices"]


BAD_NUMBERS = [
    *(f'"{field}": {value}' for field in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
                                          "repetition_penalty", "deadline_s") for value in
      ("NaN", "Infinity", "-Infinity", "1e400", "true", '"0.7"', "[1]", "-3", "1e300")
      if (field, value) != ("deadline_s", "1e300")),
    *(f'"{field}": -1' for field in ("temperature", "top_p", "min_p", "repetition_penalty", "deadline_s")),
    *(f'"logit_bias": {{"5": {value}}}' for value in ("NaN", "Infinity", "-Infinity", "1e400", "true", "-101")),
    f'"seed": {2**63}', f'"seed": {-(2**63) - 1}', f'"seed": {2**64}', '"seed": 1.5',
    '"max_tokens": 2147483647', '"max_tokens": 1e18', f'"max_tokens": {10**18}', '"max_tokens": -1',
    '"max_tokens": 1.5', '"max_tokens": true', '"n": 0', '"n": 1000000', '"n": -1', f'"priority": {2**70}',
    f'"priority": {2**31}', '"priority": "urgent"', '"logprobs": 21', '"logprobs": -1', '"logprobs": true',
    '"top_k": -2', '"min_tokens": 200', '"stop": [""]', '"stop": ""', '"stop": [1]', '"stop": {}', '"deadline_s": 0',
    '"stop_token_ids": [264]', '"stop_token_ids": [-1]', '"repetition_penalty": 0', '"request_id": "a b"',
    '"request_id": ""', '"stream": "yes"', '"stream": 1', '"stream_options": {"include_usage": true}',
    '"model": 5', '"logit_bias": {"5": 101}', '"logit_bias": {"5": "a"}', '"prompt_logprobs": 21',
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", BAD_NUMBERS)
def test_a_bad_value_is_refused_by_name_in_strict_json(client, alive, field, path):
    """SMP-5."""
    if "chat" in path and field == '"logprobs": true':
        field = '"logprobs": 1'  # a flag there, and a number in completions
    text = '"messages": [{"role": "user", "content": "a"}]' if "chat" in path else '"prompt": "a"'
    response = post(client, f"{{{text}, {field}}}".encode(), path)
    error = error_of(response, 400)
    name = field.split('"')[1]
    if error["code"] != "invalid_json":
        assert name in error["message"]
    alive()


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_largest_seeds_are_taken(client, seed):
    """SMP-5."""
    answers = [
        post(client, {"prompt": "a", "seed": seed, "max_tokens": 6, "return_token_ids": True}).json() for _ in range(2)
    ]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "field",
    [
        {"suffix": "x"},
        {"best_of": 2},
        {"tools": [{"type": "function"}]},
        {"structural_tag": "{}"},
        {"use_beam_search": True},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_not_supported_is_refused_by_name(client, path, field):
    body = ({"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}) | field
    error = error_of(post(client, body, path), 400)
    (name,) = field
    assert name in error["message"] and error["param"] == name


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", {"continue_final_message": True}),
        ("/v1/completions", {"add_generation_prompt": False}),
        ("/v1/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"max_completion_tokens": 5}),
        ("/v1/chat/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"echo": True}),
    ],
)
def test_a_field_of_the_other_route_is_refused_naming_that_route(fake_client, path, field):
    error = error_of(post(fake_client, field, path), 400)
    (name,) = field
    other = "/v1/completions" if "chat" in path else "/v1/chat/completions"
    assert error["param"] == name and f"{name} is a field of {other};" in error["message"]


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ({"suffix": "x"}, "cannot be told what follows"),
        ({"best_of": 3, "n": 2}, "best_of is 3 and n is 2; they must be equal"),
        ({"best_of": 0}, "best_of is 0"),
        ({"best_of": True}, "best_of"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [264]}, "allowed_token_ids has id 264"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has id -1"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": [65] * 8193}, "the limit is 8192"),
        ({"bad_words": [""]}, "bad_words has ''"),
        ({"bad_words": [" "]}, "bad_words has ' '"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a"] * 65}, "the limit is 64"),
        ({"bad_words": ["a" * 257]}, "the limit is 256"),
        ({"bad_words": ["A"], "allowed_token_ids": [65]}, "bad_words holds off every token of allowed_token_ids"),
        ({"min_tokens": 2, "allowed_token_ids": [65], "stop_token_ids": [65]}, "min_tokens is 2"),
        (
            {"min_tokens": 1, "allowed_token_ids": [65, 66], "stop_token_ids": [65], "bad_words": ["B"]},
            "no other token of allowed_token_ids is left by bad_words",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"truncate_prompt_tokens": 129}, "the limit is 128"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats needs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bad_value_of_a_lesser_known_field_is_refused(client, path, field, word):
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    error = error_of(post(client, body | {"max_tokens": 4} | field, path), 400)
    assert word in error["message"] and error["param"] in field


def test_unknown_fields_and_harmless_values_are_accepted(client):
    body = {"prompt": "a", "max_tokens": 1, "no_such_field": 1, "tools": [], "response_format": {"type": "text"}}
    assert post(client, body | {"best_of": 2, "n": 2}).status_code == 200
    harmless = {"best_of": 1, "suffix": "", "bad_words": [], "add_generation_prompt": True, "truncate_prompt_tokens": 9}
    assert post(client, body | harmless).status_code == 200


def test_another_model_is_not_found(client):
    error = error_of(post(client, {"prompt": "a", "model": "gpt-7"}), 404)
    assert error["code"] == "model_not_found" and "gpt-7" in error["message"] and "tiny" in error["message"]


def test_a_body_over_the_limit_is_refused_without_being_read(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 30000000\r\n\r\n{")
        connection.settimeout(10)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413")
    assert "8388608" in strict_json(answer.split(b"\r\n\r\n", 1)[1].decode())["error"]["message"]


def test_a_body_that_grows_over_the_limit_is_cut_off(client):
    def pieces():
        for _ in range(200):
            yield b" " * 100_000

    response = client.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    error_of(response, 413)


def test_other_content_types_are_refused(client):
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(response, 415)["message"]


def test_a_prompt_that_fills_a_long_body_is_refused_by_its_length(client, alive):
    error = error_of(post(client, {"prompt": "x" * 3_000_000}), 400)
    assert "3000000" in error["message"] and "128" in error["message"]
    alive()


def test_unknown_paths_and_methods_answer_in_the_error_format(client):
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_special_token_text_in_a_prompt_counts_as_the_tokenizer_says(client):
    tokens = client.post("/tokenize", json={"prompt": "a<|eos|>"}).json()["tokens"]
    assert tokens == [ord("a"), NUM_BYTES + 1]


def test_a_request_split_over_packets_is_one_request(server):
    request = raw_request("/v1/completions", {"prompt": "The sea", "max_tokens": 2})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for start in range(0, len(request), 20):
            connection.sendall(request[start : start + 20])
        connection.settimeout(10)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server, client, monkeypatch):
    def refuse(*_):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(server.engine.engine._tokenizer, "encode", refuse, raising=True)
    text = "x" * 1_000_000
    error = error_of(post(client, {"prompt": text}), 400)
    assert error["code"] == "context_length_exceeded" and "1000000" in error["message"] and "128" in error["message"]
    messages = [{"role": "user", "content": text}]
    assert error_of(post(client, {"messages": messages}, "/v1/chat/completions"), 400)["param"] == "messages"
