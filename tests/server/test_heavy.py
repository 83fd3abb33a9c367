"""Bodies made to be dear: refused before the work, or done where nothing else waits for it."""

import json
import threading
import time
import tracemalloc

import grpc
import pytest

from jaxserve.server.errors import ApiError
from jaxserve.server.field_checks import parse_model
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from tests.server.running import error_of, until

MANY = 400_000


def refusal(parse):
    """The error of a parse, which must be found without an error, or a copy, for every item."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            parse()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes were allocated"
    assert len(refused.value.message) < 400
    return refused.value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop_token_ids", [""] * MANY, "64"),
        ("stop_token_ids", [1] * 65, "64"),
        ("stop", [1] * MANY, "16"),
        ("stop", ["a"] * 17, "16"),
        ("logit_bias", {str(index): "a" for index in range(MANY)}, "1024"),
        ("logit_bias", {str(index): 1.0 for index in range(1025)}, "1024"),
    ],
)
@pytest.mark.parametrize("cls", [CompletionRequest, ChatRequest])
def test_a_field_with_too_many_items_is_refused_by_its_length(cls, field, value, limit):
    error = refusal(lambda: cls.parse({field: value}))
    assert error.param == field and str(len(value)) in error.message and limit in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", ["x" * 100] * MANY),
        ("temperature", "x" * 5_000_000),
        ("temperature", {str(index): 1 for index in range(MANY)}),
        ("stop", ["a", ["x"] * MANY]),
        ("logit_bias", {"x" * 5_000_000: 1.0}),
        ("logit_bias", {"x" * 5_000_000: "a"}),
    ],
)
def test_a_huge_value_is_cut_before_it_is_written_into_a_message(field, value):
    def parse():
        CompletionRequest.parse({field: value}).sampling_params()

    assert refusal(parse).param == field


@pytest.mark.parametrize("prompt", [[1] * MANY, [[1] * MANY], ["a"] * 1025, [1, 2, "x" * 5_000_000]])
def test_a_huge_prompt_is_refused_by_its_length(prompt):
    assert refusal(lambda: CompletionRequest.parse({"prompt": prompt}).prompts(128)).param == "prompt"


@pytest.mark.parametrize("tokens", [[""] * MANY, [1] * ((1 << 20) + 1)])
def test_detokenize_refuses_at_the_first_fault(tokens):
    assert refusal(lambda: parse_model(DetokenizeRequest, {"tokens": tokens})).param == "tokens"


@pytest.fixture
def slow_tokenizer(server, monkeypatch):
    """Each text holds its thread until `release` is set; `seen` has (text's length, thread) of each call."""
    tokenizer = server.engine.engine._tokenizer
    encode, release, seen = tokenizer.encode, threading.Event(), []

    def slow(text, *args, **kwargs):
        name = threading.current_thread().name
        seen.append((len(text), name))
        if len(text) > 1500:
            assert release.wait(20)
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", slow)
    slow.release, slow.seen = release, seen
    yield slow
    release.set()


def test_many_short_prompts_are_tokenized_together_off_the_event_loop(server, client, slow_tokenizer):
    loop_thread = server.call(lambda: threading.current_thread().name)
    body = {"prompt": ["x" * 100] * 60, "max_tokens": 1}
    client.post("/v1/completions", json=body)
    assert len(slow_tokenizer.seen) == 60
    assert len({name for _, name in slow_tokenizer.seen}) == 1
    assert loop_thread not in {name for _, name in slow_tokenizer.seen}
    slow_tokenizer.seen.clear()
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1})
    assert slow_tokenizer.seen == [(3, loop_thread)]


def test_big_tokenize_calls_do_not_keep_prompts_waiting(server, client, slow_tokenizer):
    def tokenize():
        with server.client() as other:
            assert other.post("/tokenize", json={"prompt": "y" * 1600}).status_code == 200

    threads = [threading.Thread(target=tokenize) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: slow_tokenizer.seen, what="one is at work")
    body = {"prompt": ["z" * 100] * 12, "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code in (200, 429)
    small = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True})
    assert small.json()["token_strs"] == ["a", "b", "c"]
    slow_tokenizer.release.set()
    for thread in threads:
        thread.join(20)


def test_token_texts_and_ranges_are_looked_up_off_the_event_loop(server, client, monkeypatch):
    tokenizer = server.engine.engine._tokenizer
    loop_thread = server.call(lambda: threading.current_thread())
    threads = set()
    for name in ("token_text", "decode"):
        original = getattr(tokenizer, name)

        def spy(*args, original=original, **kwargs):
            threads.add(threading.current_thread())
            return original(*args, **kwargs)

        monkeypatch.setattr(tokenizer, name, spy)
    answer = client.post("/tokenize", json={"prompt": "x" * 1500, "return_token_strs": True}).json()
    assert len(answer["token_strs"]) == 1500
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "x" * 1500
    assert threads and loop_thread not in threads
    error = error_of(client.post("/detokenize", json={"tokens": [1] * 1500 + [9999]}), 400)
    assert error["param"] == "tokens" and "9999" in error["message"]


BIG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": BIG}, "prompt"),
        ({"messages": [{"role": "user", "content": BIG}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": BIG}]}, "messages"),
    ],
)  # fmt: skip
def test_tokenize_refuses_what_cannot_fit_before_the_work(client, slow_tokenizer, body, param):
    error = error_of(client.post("/tokenize", json=body), 400)
    assert error["param"] == param and error["code"] == "context_length_exceeded"
    if "messages" in body:
        assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == param
    assert not slow_tokenizer.seen


@pytest.mark.parametrize("value", [[{"b": BIG}], [1] * 100_000, {BIG: 1}])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_huge_template_variables_are_refused(client, slow_tokenizer, path, value):
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": value}}
    error = error_of(client.post(path, json=body), 400)
    assert error["param"] == "chat_template_kwargs" and "65536" in error["message"]
    assert not slow_tokenizer.seen


def test_template_variables_of_some_size_are_rendered_off_the_event_loop(server, client, slow_tokenizer):
    loop_thread = server.call(lambda: threading.current_thread().name)
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ["b" * 2000]}}
    assert client.post("/tokenize", json=body).status_code == 200
    name = {"messages": [{"role": "user", "content": "a", "name": "b" * 1200}]}
    assert client.post("/tokenize", json=name).status_code == 200
    assert len(slow_tokenizer.seen) == 2 and loop_thread not in {thread for _, thread in slow_tokenizer.seen}


def test_grpc_tokenize_and_generate_refuse_it_too(server, slow_tokenizer):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=BIG)])
    named = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a", name=BIG)])
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for fields in ({"text": BIG}, {"chat": chat}, {"chat": named}):
            with pytest.raises(grpc.RpcError, match="input has 1000") as failed:
                stub.Tokenize(pb.TokenizeRequest(**fields))
            assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.RpcError, match="input has 1000"):
                list(stub.Generate(pb.GenerateRequest(**fields)))
        small = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")])
        with pytest.raises(grpc.RpcError, match="add_special_tokens"):
            stub.Tokenize(pb.TokenizeRequest(chat=small, add_special_tokens=False))
    assert not slow_tokenizer.seen


def test_the_server_answers_others_while_it_refuses_a_heavy_body(client, alive):
    body = json.dumps({"prompt": "a", "stop_token_ids": [""] * MANY}).encode()
    began = time.monotonic()
    error_of(client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)
    assert time.monotonic() - began < 1
    alive()
