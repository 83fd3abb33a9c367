"""Whatever a client sizes has a bound: the bound is taken, one more is refused by name. docs/security.md lists them."""

import contextlib
import json

import grpc
import httpx
import pytest

from jaxserve.core.sampling_params import MAX_STOP_STRING_CHARS
from jaxserve.core.structured_outputs import MAX_CHOICES
from jaxserve.server.grpc_service import MAX_METADATA_BYTES
from jaxserve.server.lora_routes import MAX_PATH_CHARS
from jaxserve.server.messages import MAX_ARGUMENTS_CHARS, MAX_CALLS, MAX_ID_CHARS, MAX_MESSAGES, MAX_PARTS
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.schema import MAX_PROMPTS
from jaxserve.server.service import MAX_VARIABLES_CHARS, num_chars
from jaxserve.server.settings import HttpSettings
from jaxserve.server.tools import MAX_TOOL_DEPTH, MAX_TOOLS, MAX_TOOLS_CHARS
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of

TEXT, CHAT, RESPONSES, TOKENIZE, LORA = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/v1/load_lora_adapter",
)
BODY_BYTES = 1 << 20


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def calls(count, name="f", call_id="c", arguments="{}"):
    made = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}] * count
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": made}]}


def tools(count, description="d", name="f", depth=0):
    inner = {}
    for _ in range(depth):
        inner = {"a": inner}
    function = {"description": description, "parameters": inner}
    return user("a") | {
        "tools": [{"type": "function", "function": function | {"name": f"{name}{index}"}} for index in range(count)],
        "tool_choice": "auto",
    }


def nested(count):
    """JSON so many levels deep."""
    return json.loads("[" * count + "]" * count)


TOOL_CHARS = num_chars(tools(1, "")["tools"], 1000)
BOUNDS = {
    # name: (route, limit, body of a size)
    "messages": (CHAT, MAX_MESSAGES, lambda n: {"messages": [{"role": "user", "content": ""}] * n}),
    "items of input": (RESPONSES, MAX_MESSAGES, lambda n: {"input": [{"role": "user", "content": ""}] * n}),
    "content parts": (CHAT, MAX_PARTS, lambda n: user([{"type": "text", "text": ""}] * n)),
    "calls of a message": (CHAT, MAX_CALLS, calls),
    "a call's id": (CHAT, MAX_ID_CHARS, lambda n: calls(1, call_id="c" * n)),
    "a call's name": (CHAT, MAX_ID_CHARS, lambda n: calls(1, name="f" * n)),
    "a call's arguments": (
        CHAT,
        MAX_ARGUMENTS_CHARS,
        lambda n: calls(1, arguments=json.dumps({"a": "x" * (n - 9)})),
    ),
    "a result's call id": (
        CHAT,
        MAX_ID_CHARS,
        lambda n: {"messages": [{"role": "tool", "content": "a", "tool_call_id": "c" * n}]},
    ),
    "a result's call id in input": (
        RESPONSES,
        MAX_ID_CHARS,
        lambda n: {"input": [{"type": "function_call_output", "call_id": "c" * n, "output": "a"}]},
    ),
    "tools": (CHAT, MAX_TOOLS, tools),
    "a tool's name": (CHAT, 128, lambda n: tools(1, name="f" * (n - 1))),
    "a tool's schema": (CHAT, MAX_TOOL_DEPTH, lambda n: tools(1, depth=n)),
    "characters of tools": (
        CHAT,
        MAX_TOOLS_CHARS,
        lambda n: tools(1, description="d" * (n - num_chars(tools(1, "")["tools"], n))),
    ),
    "template variables": (
        CHAT,
        MAX_VARIABLES_CHARS,
        lambda n: user("a") | {"chat_template_kwargs": {"v": "x" * (n - 4)}},
    ),
    "prompts": (TEXT, MAX_PROMPTS, lambda n: {"prompt": ["a"] * n}),
    "choices": (TEXT, 128, lambda n: {"prompt": "a", "n": n}),
    "alternatives": (TEXT, 20, lambda n: {"prompt": "a", "logprobs": n}),
    "alternatives of a chat": (CHAT, 20, lambda n: user("a") | {"logprobs": True, "top_logprobs": n}),
    "alternatives of a prompt": (TEXT, 20, lambda n: {"prompt": "a", "prompt_logprobs": n}),
    "stop strings": (TEXT, 16, lambda n: {"prompt": "a", "stop": ["\0"] * n}),
    "a stop string": (TEXT, MAX_STOP_STRING_CHARS, lambda n: {"prompt": "a", "stop": "\0" * n}),
    "stop ids": (TEXT, 64, lambda n: {"prompt": "a", "stop_token_ids": [0] * n}),
    "logit_bias": (TEXT, 1024, lambda n: {"prompt": "a", "logit_bias": {str(index): 1 for index in range(n)}}),
    "allowed ids": (TEXT, 8192, lambda n: {"prompt": "a", "allowed_token_ids": [97] * n}),
    "bad words": (TEXT, 64, lambda n: {"prompt": "a", "bad_words": ["zz"] * n}),
    "a bad word": (TEXT, 256, lambda n: {"prompt": "a", "bad_words": ["z" * n]}),
    "request_id": (TEXT, 128, lambda n: {"prompt": "a", "request_id": "r" * n}),
    "tenant": (TEXT, 256, lambda n: {"prompt": "a", "tenant": "t" * n}),
    "cache_salt": (TEXT, 256, lambda n: {"prompt": "a", "cache_salt": "s" * n}),
    "service_class": (TEXT, 256, lambda n: {"prompt": "a", "service_class": "s" * n}),
    "texts to choose from": (
        TEXT,
        MAX_CHOICES,
        lambda n: {"prompt": "a", "structured_outputs": {"choice": ["a"] * n}},
    ),
    "metadata": (RESPONSES, 16, lambda n: {"input": "a", "metadata": {str(index): "" for index in range(n)}}),
    "a key of metadata": (RESPONSES, 64, lambda n: {"input": "a", "metadata": {"k" * n: ""}}),
    "a value of metadata": (RESPONSES, 512, lambda n: {"input": "a", "metadata": {"k": "v" * n}}),
    "an adapter's path": (LORA, MAX_PATH_CHARS, lambda n: {"lora_name": f"a{n}", "lora_path": "/" * n}),
    "levels of JSON": (TEXT, 1023, lambda n: {"prompt": "a", "unknown": nested(n)}),
}


@pytest.fixture(scope="module")
def client():
    settings = HttpSettings(max_body_bytes=BODY_BYTES, allow_runtime_lora_updating=True)

    def make():
        engine = FakeEngine()
        engine.max_model_len, engine.max_live = 1 << 20, 2000
        return engine

    server = RunningServer(make, settings)
    with server.client() as client:
        client.grpc_address = server.grpc_address
        yield client
    server.stop()


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_is_taken_and_one_more_refused(client, name):
    route, limit, body = BOUNDS[name]
    short = {} if route == LORA else {"max_output_tokens": 1} if route == RESPONSES else {"max_tokens": 1}
    taken = client.post(route, json=body(limit) | short)
    assert taken.status_code == 200, taken.text[:500]
    error = error_of(client.post(route, json=body(limit + 1) | short), 400)
    assert len(error["message"]) < 500
    assert client.get("/health").status_code == 200


def test_a_body_has_a_bound(client):
    frame = len(json.dumps({"prompt": ""}))
    body = {"prompt": "x" * (BODY_BYTES - frame)}
    assert len(json.dumps(body)) == BODY_BYTES
    headers = {"Content-Type": "application/json"}
    assert client.post(TOKENIZE, content=json.dumps(body), headers=headers).status_code == 200
    for _ in range(10):
        # The server closes while the body is still being sent, and the answer may be lost by that.
        with contextlib.suppress(httpx.TransportError):
            error_of(client.post(TOKENIZE, content=json.dumps(body) + " ", headers=headers), 413)
            return
    raise AssertionError("no refusal came through")


@pytest.mark.parametrize("header", ["X-Tenant", "X-Service-Class"])
def test_headers_that_are_names_have_the_bound_of_the_fields(client, header):
    body = {"prompt": "a", "max_tokens": 1}
    assert client.post(TEXT, json=body, headers={header: "t" * 256}).status_code == 200
    error_of(client.post(TEXT, json=body, headers={header: "t" * 257}), 400)


def test_a_head_has_a_bound(client):
    assert client.get("/health", headers={"X": "x" * 60_000}).status_code == 200
    with contextlib.suppress(httpx.TransportError):  # the connection is closed while the head is being sent
        assert client.get("/health", headers={"X": "x" * 70_000}).status_code == 400
    assert client.get("/health").status_code == 200


def test_messages_and_metadata_of_grpc_have_a_bound(client):
    with grpc.insecure_channel(client.grpc_address, [("grpc.max_send_message_length", -1)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert stub.Tokenize(pb.TokenizeRequest(text="x" * (BODY_BYTES - 100))).token_ids
        for request, metadata in (
            (pb.TokenizeRequest(text="x" * (BODY_BYTES + 100)), []),
            (pb.TokenizeRequest(text="x"), [("x", "x" * (2 * MAX_METADATA_BYTES))]),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Tokenize(request, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Tokenize(pb.TokenizeRequest(text="x")).token_ids
