"""Tools on the engine itself: a random model, whose calls are what structured output makes them."""

import json

import pytest

from jaxserve.testing.tiny import PAD_ID, write_tiny_model
from tests.server.running import RunningServer, error_of

CHAT = "/v1/chat/completions"
NOW = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "How is the weather?"}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
POINTS = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "unit": {"enum": ["m", "ft"]}},
    "required": ["at", "unit"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
}


@pytest.fixture(scope="module")
def tool_server(make_tiny_engine, tmp_path_factory):
    """The tiny model behind a template that knows tools."""
    directory = write_tiny_model(tmp_path_factory.mktemp("tools") / "model", chat_template=TEMPLATE)
    engine = make_tiny_engine(tokenizer=str(directory), max_model_len=256, table_width_buckets=(16,))
    server = RunningServer(lambda: engine)
    yield server
    server.stop()


def test_a_random_model_calls_what_it_must_with_arguments_that_fit(tool_server):
    move = {"type": "function", "function": {"name": "move", "parameters": POINTS}}
    fields = {"messages": [{"role": "user", "content": "go"}], "tools": [move, NOW], "temperature": 1}
    with tool_server.client() as client:
        for seed in range(4):
            chosen = {"tool_choice": {"type": "function", "function": {"name": "move"}}, "seed": seed}
            choice = client.post(CHAT, json=fields | chosen).json()["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert list(map(type, arguments["at"])) == [bool, bool] and arguments["unit"] in ("m", "ft")
            assert choice["finish_reason"] == "tool_calls"
            required = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
            message = client.post(CHAT, json=fields | required).json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert message["content"] is None and call["function"]["name"] in ("move", "now")
            if call["function"]["name"] == "move":
                assert len(json.loads(call["function"]["arguments"])["at"]) == 2


def test_a_real_template_gets_tools_and_calls(tool_server):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with tool_server.client() as client:
        ids = client.post("/tokenize", json={"messages": messages, "tools": [NOW]}).json()["tokens"]
        prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert prompt.startswith("now <|im_start|>user")
        assert '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>' in prompt
        bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
        fields = {"messages": [USER], "tools": [bad], "tool_choice": "required"}
        assert error_of(client.post(CHAT, json=fields), 400)["param"] == "tools"


def test_the_formats_special_tokens_are_kept_in_the_text(make_tiny_engine, tmp_path):
    directory = write_tiny_model(tmp_path / "model", chat_template=TEMPLATE)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / file).read_text()
        (directory / file).write_text(text.replace("<|pad|>", "<tool_call>"))
    server = RunningServer(lambda: make_tiny_engine(tokenizer=str(directory)))
    try:
        with server.client() as client:
            fields = {"messages": [USER], "max_tokens": 2, "allowed_token_ids": [PAD_ID]}
            plain = client.post(CHAT, json=fields).json()["choices"][0]["message"]
            assert plain["content"] == ""
            with_tools = client.post(CHAT, json=fields | {"tools": [NOW]}).json()["choices"][0]["message"]
            assert with_tools["content"] == "<tool_call>" * 2
            others = fields | {"tools": [NOW], "allowed_token_ids": [PAD_ID - 2]}
            assert client.post(CHAT, json=others).json()["choices"][0]["message"]["content"] == ""
    finally:
        server.stop()
