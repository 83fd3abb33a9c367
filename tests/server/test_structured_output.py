"""Structured output over HTTP and gRPC: the spellings of OpenAI, vLLM and SGLang, and what is refused."""

import json
import re
import threading
from typing import Literal

import grpc
import openai
import pydantic
import pytest

from jaxserve.server import service
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import choice_texts, error_of, events_of, metric_samples

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"}, "rank": {"enum": [1, 2, 3]}},
    "required": ["city", "rank"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
NAMED = {"name": "place", "schema": SCHEMA, "strict": True}
NO_BLANKS = {str(blank): -100 for blank in b" \t\n\r"}
"""For the random model, which likes them: a `logit_bias`."""
ROUTES = ("/v1/completions", "/v1/chat/completions")


def body_of(path, **fields):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return prompt | {"max_tokens": 80, "temperature": 0} | fields


def text_of(client, path, **fields):
    response = client.post(path, json=body_of(path, **fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "chat" in path else choice["text"]


def is_place(text):
    place = json.loads(text)
    return (
        list(place) == ["city", "rank"]
        and re.fullmatch("[A-Z][a-z]{2,5}", place["city"])
        and place["rank"] in (1, 2, 3)
    )


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": TEXT, "disable_any_whitespace": True, "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": TEXT, "guided_whitespace_pattern": " "},
        {"json_schema": TEXT},
        {"response_format": {"type": "text"}, "structured_outputs": {"json": SCHEMA}},
    ],
    ids=str,
)
def test_a_json_schema_in_every_spelling(client, path, fields):
    assert is_place(text_of(client, path, **fields))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"?'}}, "xy?"),
        ({"guided_grammar": 'root ::= "x" "y"?'}, "xy?"),
        ({"ebnf": 'root ::= "x" "y"?'}, "xy?"),
    ],
    ids=str,
)
def test_the_other_constraints_in_every_spelling(client, path, fields, pattern):
    assert re.fullmatch(pattern, text_of(client, path, **fields))


@pytest.mark.parametrize("path", ROUTES)
def test_json_mode_gives_the_beginning_of_an_object(client, path):
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = client.post(path, json=body_of(path, **fields) | {"max_tokens": 20}).json()["choices"][0]
        text = answer["message"]["content"] if "chat" in path else answer["text"]
        assert text.startswith("{") and answer["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("path", ROUTES)
def test_streamed_is_the_same_as_whole_for_every_choice(client, path):
    fields = {"guided_json": SCHEMA, "n": 3, "temperature": 1.2, "seed": 5, "logit_bias": NO_BLANKS}
    whole = client.post(path, json=body_of(path, **fields)).json()["choices"]
    response = client.post(path, json=body_of(path, **fields, stream=True))
    texts = choice_texts(events_of(response.text))
    assert texts == {c["index"]: c["message"]["content"] if "chat" in path else c["text"] for c in whole}
    assert all(is_place(text) for text in texts.values())


BAD = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs.regex cannot be followed"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex cannot be followed"),
    ({"regex": "("}, "regex", "regex cannot be followed"),
    ({"guided_json": {"type": "nope"}}, "guided_json", "guided_json cannot be followed: Invalid type: nope"),
    ({"guided_json": "{"}, "guided_json", "guided_json is no JSON"),
    ({"guided_grammar": "start: other"}, "guided_grammar", 'unknown name: "other"'),
    ({"ebnf": "root ::= ("}, "ebnf", "ebnf is neither Lark"),
    ({"json_schema": '{"not": {}}'}, "json_schema", "json_schema cannot be followed: Unimplemented keys"),
    ({"guided_choice": []}, "guided_choice", "guided_choice has 0 texts"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json, regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
    ({"structured_outputs": "json"}, "structured_outputs", "structured_outputs"),
    ({"response_format": {"type": "nope"}}, "response_format", "must be one of text, json_object, json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format",
        "schema is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}}},
        "response_format",
        "response_format.json_schema.schema cannot be followed: Invalid type: nope",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex each say"),
    (
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "regex and response_format each say what the output must be; give one",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
    ({"structural_tag": "{}"}, "structural_tag", "not supported"),
    ({"guided_regex": "a" * 140000}, "guided_regex", "has 140000 bytes; the limit is 131072 (max_grammar_bytes)"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[str(case[0])[:60] for case in BAD])
def test_what_cannot_be_followed_is_a_400_that_names_the_field(client, path, fields, param, message):
    error = error_of(client.post(path, json=body_of(path, **fields)), 400)
    assert message in error["message"] and error["param"] == param, error


def test_a_failure_midway_says_why_and_hits_nobody_else(client, alive):
    fields = {"guided_regex": "ab+", "allowed_token_ids": [97]}
    error = error_of(client.post(ROUTES[0], json=body_of(ROUTES[0], **fields)), 400)
    assert error["code"] == "unfollowable" and error["param"] == "allowed_token_ids"
    assert "no token of those that structured_outputs allows after 1 output tokens" in error["message"]
    last = events_of(client.post(ROUTES[0], json=body_of(ROUTES[0], **fields, stream=True)).text)[-1]
    assert last == {"error": error}
    alive()


def test_too_many_constraints_waiting_are_a_429(server, client, monkeypatch, alive):
    monkeypatch.setattr(service, "MAX_WAITING_GRAMMARS", 1)
    entered, leave = threading.Event(), threading.Event()
    real = server.engine.compile_grammar

    def slow(wanted):
        entered.set()
        assert leave.wait(20)
        return real(wanted)

    monkeypatch.setattr(server.engine, "compile_grammar", slow)
    answers = []
    body = body_of(ROUTES[0], guided_regex="[a-c]{3}")

    def ask():
        with server.client() as other:
            answers.append(other.post(ROUTES[0], json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(20)
    refused = client.post(ROUTES[0], json=body | {"n": 2, "request_id": "my-req"})
    assert refused.headers["x-request-id"] == "my-req"
    name = 'jaxserve:requests_rejected_total{engine="0",model_name="tiny",reason="grammars_waiting"}'
    assert dict(metric_samples(client.get("/metrics").text))[name] == 2
    assert error_of(refused, 429)["code"] == "grammars_waiting" and int(refused.headers["Retry-After"]) >= 1
    alive()  # those without a constraint do not wait
    leave.set()
    thread.join(20)
    assert answers[0].status_code == 200


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_parses_what_its_response_format_asks_for(api):
    class Place(pydantic.BaseModel):
        city: Literal["Rome", "Oslo"]
        rank: Literal[1, 2]
        near: Literal["sea"] | None

    messages = [{"role": "user", "content": "hi"}]
    settings = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 100}
    parsed = api.chat.completions.parse(**settings, response_format=Place, logit_bias=NO_BLANKS)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    answer = api.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": NAMED},
    )
    assert is_place(answer.choices[0].message.content) and answer.choices[0].finish_reason == "stop"
    streamed = api.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=9, stream=True, extra_body={"guided_choice": ["yes"]}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "yes"
    with pytest.raises(openai.BadRequestError, match="Invalid type: nope"):
        bad = {"name": "x", "schema": {"type": "nope"}}
        api.chat.completions.create(
            model="tiny", messages=messages, response_format={"type": "json_schema", "json_schema": bad}
        )


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate(stub, **fields):
    sampling = pb.SamplingParams(temperature=0, max_tokens=80, structured_outputs=pb.StructuredOutputs(**fields))
    return stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling))


def test_every_constraint_over_grpc(stub):
    def text(**fields):
        return "".join(message.text for message in generate(stub, **fields))

    assert is_place(text(json=TEXT, disable_any_whitespace=True)) and is_place(text(json=TEXT, whitespace_pattern=" "))
    assert re.fullmatch("[a-c]{3}", text(regex="[a-c]{3}"))
    assert text(choice=pb.Choices(texts=["yes", "no"])) in ("yes", "no")
    assert text(grammar='start: "x"') == "x"
    assert text(json_object=True).startswith("{")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"regex": "("}, "regex cannot be followed"), ({}, "exactly one of"), ({"json_object": False}, "exactly one of")],
)
def test_what_cannot_be_followed_is_an_invalid_argument(stub, alive, fields, message):
    with pytest.raises(grpc.RpcError) as failed:
        list(generate(stub, **fields))
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT and message in failed.value.details()
    alive()
