"""Tools in chat completions: fields, messages, calls whole and streamed."""

import itertools
import json
import re

import openai
import pytest

from jaxserve.server.messages import MAX_ARGUMENTS_CHARS
from jaxserve.text.tool_forms import ToolForms
from tests.server.fake_engine import script
from tests.server.running import error_of, events_of

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "How is the weather?"}
ARGUMENTS = '{ "city":"Orl\\u00e9ans \\"é\\"" }'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>'


def body(**fields):
    return {"messages": [USER], "tools": [WEATHER, NOW]} | fields


def streamed(events):
    """The message of choice 0 and its finish, put together as clients do."""
    content, calls, finish = "", [], []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"]:
                continue
            delta = choice["delta"]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(calls):
                    assert part["type"] == "function" and part["id"] and part["function"]["name"]
                    calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
    assert events[-1] == "[DONE]" and len(finish) == 1
    return content, calls, finish[0]


def test_a_call_is_a_message_with_calls_and_no_content(fake_server, fake_client):
    script(fake_server, ONE)
    choice = fake_client.post(CHAT, json=body()).json()["choices"][0]
    message = choice["message"]
    assert message["content"] is None and message["role"] == "assistant"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}, "arguments are as the model wrote them"
    assert choice["finish_reason"] == "tool_calls"


TEXTS = [ONE, TWO, BROKEN, BROKEN + ONE, "plain", f"{TWO}\nAnd more.", "<tool_call>", ONE[:-30]]


def test_streamed_is_whole(fake_server, fake_client):
    for text, piece in itertools.product(TEXTS, (1, 2, 3, 7, 50, 1000)):
        script(fake_server, text, piece)
        choice = fake_client.post(CHAT, json=body()).json()["choices"][0]
        content, calls, finish = streamed(events_of(fake_client.post(CHAT, json=body(stream=True)).text))
        message = choice["message"]
        assert content == (message["content"] or "")
        whole = [call["function"] for call in message.get("tool_calls", ())]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == whole
        assert finish == choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert len({call["id"] for call in calls}) == len(calls)


def test_a_malformed_call_is_content(fake_server, fake_client):
    script(fake_server, BROKEN)
    choice = fake_client.post(CHAT, json=body()).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": BROKEN, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_was_cut_off_is_content_and_says_length(fake_server, fake_client):
    script(fake_server, ONE)
    choice = fake_client.post(CHAT, json=body(max_tokens=10)).json()["choices"][0]
    assert choice["message"]["content"] == ONE[:30] and choice["finish_reason"] == "length"


def test_without_tools_text_that_looks_like_a_call_is_text(fake_server, fake_client):
    script(fake_server, ONE)
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        choice = fake_client.post(CHAT, json=body(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == ONE and choice["finish_reason"] == "stop"
        assert fake_server.engine.tokenizer.rendered["tools"] is None


def test_every_choice_has_its_own_calls(fake_server, fake_client):
    script(fake_server, TWO)
    choices = fake_client.post(CHAT, json=body(n=3)).json()["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6 and [choice["message"]["content"] for choice in choices] == ["Let me see."] * 3


def test_without_parallel_calls_the_first_is_kept(fake_server, fake_client):
    script(fake_server, TWO)
    message = fake_client.post(CHAT, json=body(parallel_tool_calls=False)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    events = events_of(fake_client.post(CHAT, json=body(parallel_tool_calls=False, stream=True)).text)
    assert [call["name"] for call in streamed(events)[1]] == ["get_weather"]


def test_logprobs_and_usage_of_streams_count_every_token_once(fake_server, fake_client):
    script(fake_server, TWO)
    fields = {"logprobs": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events_of(fake_client.post(CHAT, json=body(**fields)).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert len(entries) == len(ids) == last["usage"]["completion_tokens"] == -(-len(TWO) // 3)


def test_tools_and_messages_reach_the_template(fake_server, fake_client):
    script(fake_server, "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert fake_client.post(CHAT, json=body(messages=messages)).status_code == 200
    rendered = fake_server.engine.tokenizer.rendered
    assert rendered["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert rendered["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert rendered["tools"] == [
        WEATHER,
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def function(**members):
    return [{"type": "function", "function": {"name": "f"} | members}]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [5]}, "tools", "tools\\[0\\] must be an object"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only tools of type function"),
        ({"tools": [{"type": "function"}]}, "tools", "tools\\[0\\].function must be an object"),
        ({"tools": function(name="")}, "tools", "name must have 1 to 128"),
        ({"tools": function(name="a b")}, "tools", "name must have 1 to 128"),
        ({"tools": function(description=5)}, "tools", "description must be a string"),
        ({"tools": function(parameters=[])}, "tools", "parameters must be a JSON schema"),
        ({"tools": function(parameters=deep(40))}, "tools", "deeper than 64"),
        ({"tools": function() * 2}, "tools", "names must differ"),
        ({"tools": function() * 129}, "tools", "has 129 tools; the limit is 128"),
        ({"tools": function(description="x" * 300_000)}, "tools", "too large; the limit is 262144"),
        ({"tool_choice": "always"}, "tool_choice", "must be one of none, auto, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "must be one of"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names 'g'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be one of"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "boolean"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tools"),
    ],
)
def test_bad_tool_fields_are_refused_by_name(client, fields, param, word):
    for stream in (False, True):
        error = error_of(client.post(CHAT, json=body(**fields, stream=stream)), 400)
        assert error["param"] == param and re.search(word, error["message"])


def called(**members):
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}} | members]}


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id must be the id"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "tool_call_id must be the id"),
        ({"role": "tool", "tool_call_id": "c"}, "content must be a string"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "belongs to messages of role tool"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "belongs to messages of role assistant"),
        ({"role": "assistant", "tool_calls": 5}, "must be a list"),
        (called(id=None), "id must be a string"),
        (called(type="custom"), "of type function"),
        (called(function=None), "function must be an object"),
        (called(function={}), "name must be a string"),
        (called(function={"name": "f", "arguments": {"a": 1}}), "must be a string that holds a JSON object"),
        (called(function={"name": "f", "arguments": "{"}), "must be a string that holds a JSON object"),
        (called(function={"name": "f", "arguments": "[" * 100_000}), "must be a string that holds a JSON object"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "use tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(client, message, word):
    error = error_of(client.post(CHAT, json=body(messages=[USER, message])), 400)
    assert error["message"].startswith("messages[1].") and word in error["message"] and error["param"] == "messages"


def test_arguments_have_a_limit(fake_client):
    arguments = json.dumps({"a": "x" * MAX_ARGUMENTS_CHARS})
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    error = error_of(
        fake_client.post(CHAT, json=body(messages=[USER, {"role": "assistant", "tool_calls": [call]}])), 400
    )
    assert f"the limit is {MAX_ARGUMENTS_CHARS}" in error["message"] and "tool_calls[0]" in error["message"]


def test_a_call_without_arguments_has_none(fake_server, fake_client):
    script(fake_server, "ok")
    messages = [USER, called(), {"role": "tool", "tool_call_id": "c", "content": ""}]
    assert fake_client.post(CHAT, json=body(messages=messages)).status_code == 200
    message = fake_server.engine.tokenizer.rendered["messages"][1]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_a_message_with_calls_is_not_continued(fake_client):
    fields = {"messages": [USER, called()], "continue_final_message": True}
    assert "without tool_calls" in error_of(fake_client.post(CHAT, json=body(**fields)), 400)["message"]


def test_a_template_that_leaves_tools_or_calls_out_is_no_silent_loss(fake_server, fake_client):
    fake_server.engine.tokenizer.tool_forms = ToolForms("{{ messages }}", writes_tools=False, writes_calls=False)
    error = error_of(fake_client.post(CHAT, json=body()), 400)
    assert error["param"] == "tools" and "does not write them" in error["message"]
    messages = [USER, called(), {"role": "tool", "tool_call_id": "c", "content": ""}]
    error = error_of(fake_client.post(CHAT, json={"messages": messages}), 400)
    assert error["param"] == "messages" and "tool calls" in error["message"]
    assert fake_client.post(CHAT, json=body(tool_choice="none")).status_code == 200


def test_a_template_that_tells_no_format_needs_the_flag(fake_server, fake_client):
    fake_server.engine.tokenizer.tool_forms = ToolForms("{{ tools }}", writes_tools=True, writes_calls=True)
    error = error_of(fake_client.post(CHAT, json=body()), 400)
    assert error["param"] == "tools" and "--tool_call_parser" in error["message"] and "hermes" in error["message"]


def test_completions_have_no_tools(fake_client):
    for fields in ({"tools": [WEATHER]}, {"tool_choice": "required"}):
        error = error_of(fake_client.post("/v1/completions", json={"prompt": "a"} | fields), 400)
        assert "field of /v1/chat/completions" in error["message"]
    harmless = {"prompt": "a", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tokens": 1}
    assert fake_client.post("/v1/completions", json=harmless).status_code == 200


def test_tokenize_shows_the_prompt_with_tools(fake_server, fake_client):
    assert fake_client.post("/tokenize", json={"messages": [USER], "tools": [NOW]}).status_code == 200
    assert fake_server.engine.tokenizer.rendered["tools"][0]["function"]["name"] == "now"


def test_the_openai_client_goes_through_a_whole_round(fake_server):
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as api:
        script(fake_server, TWO)
        asked = {"model": "fake", "messages": [USER], "tools": [WEATHER, NOW]}
        choice = api.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": 'Orléans "é"'}
        with api.chat.completions.stream(**asked) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0].message
        assert [event.name for event in done] == ["get_weather", "now"] and done[0].arguments == ARGUMENTS
        assert [call.function.name for call in final.tool_calls] == ["get_weather", "now"]
        script(fake_server, "It is sunny.")
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in final.tool_calls]
        messages = [USER, final.model_dump(exclude_none=True), *results]
        answer = api.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, NOW])
        assert answer.choices[0].message.content == "It is sunny."
        rendered = fake_server.engine.tokenizer.rendered["messages"]
        assert rendered[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def named(name):
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def test_a_named_function_is_called_with_whatever_is_written(fake_server, fake_client):
    script(fake_server, ARGUMENTS, 2)
    choice = fake_client.post(CHAT, json=body(**named("get_weather"))).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    submitted = fake_server.engine.submitted[-1]["params"].structured_outputs
    assert json.loads(submitted.json) == SCHEMA
    assert [tool["function"]["name"] for tool in fake_server.engine.tokenizer.rendered["tools"]] == ["get_weather"]
    events = events_of(fake_client.post(CHAT, json=body(**named("get_weather"), stream=True)).text)
    content, (call,), finish = streamed(events)
    assert (content, call["arguments"], finish) == ("", ARGUMENTS, "tool_calls")
    fragments = [event for event in events[:-1] if "tool_calls" in event["choices"][0]["delta"]]
    assert len(fragments) == 1 + -(-len(ARGUMENTS) // 2), "arguments come as they are written"
    cut = fake_client.post(CHAT, json=body(**named("get_weather"), max_tokens=4)).json()["choices"][0]
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[:8]
    assert cut["finish_reason"] == "length"


def test_required_calls_are_a_list(fake_server, fake_client):
    text = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
    script(fake_server, text)
    choice = fake_client.post(CHAT, json=body(tool_choice="required")).json()["choices"][0]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": "{}"}]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    for piece in (1, 2, 5, 40, 1000):
        script(fake_server, text, piece)
        events = events_of(fake_client.post(CHAT, json=body(tool_choice="required", stream=True)).text)
        content, calls, _ = streamed(events)
        assert content == "" and [(call["name"], call["arguments"]) for call in calls] == [
            ("get_weather", ARGUMENTS),
            ("now", "{}"),
        ]
        if piece == 1:
            fragments = [event for event in events[:-1] if "tool_calls" in event["choices"][0]["delta"]]
            assert len(fragments) > len(ARGUMENTS) // 2, "arguments come as they are written"
    one = body(tool_choice="required", parallel_tool_calls=False)
    assert fake_client.post(CHAT, json=one).status_code == 200
    schema = json.loads(fake_server.engine.submitted[-1]["params"].structured_outputs.json)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


def test_a_list_of_calls_that_was_cut_has_what_there_is_of_it(fake_server, fake_client):
    text = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
    for length in range(1, len(text) + 1):
        script(fake_server, text[:length], 7)
        fields = body(tool_choice="required")
        choice = fake_client.post(CHAT, json=fields).json()["choices"][0]
        content, calls, _ = streamed(events_of(fake_client.post(CHAT, json=fields | {"stream": True}).text))
        message = choice["message"]
        whole = [call["function"] for call in message.get("tool_calls", ())]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == whole
        assert content == (message["content"] or "")
        begun = text.index(ARGUMENTS)
        if length <= begun:
            assert content == text[:length] and not whole
        else:
            assert whole[0]["arguments"] == ARGUMENTS[: length - begun]


def test_a_format_and_tools_exclude_each_other(fake_client):
    wanted = {"response_format": {"type": "json_object"}}
    for choice in ({}, {"tool_choice": "required"}):
        error = error_of(fake_client.post(CHAT, json=body(**wanted, **choice)), 400)
        assert error["param"] == "response_format" and "leave out tools" in error["message"]
    assert fake_client.post(CHAT, json=body(**wanted, tool_choice="none")).status_code == 200
    assert fake_client.post(CHAT, json=body(response_format={"type": "text"})).status_code == 200
