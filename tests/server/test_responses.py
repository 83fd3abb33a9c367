"""/v1/responses: input, events, what is refused because nothing is kept."""

import json

import openai
import pytest

from jaxserve.core import UnfollowableError
from tests.server.fake_engine import script
from tests.server.running import error_of, strict_json
from tests.server.test_tools import ARGUMENTS, BROKEN, ONE, SCHEMA, TWO

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": SCHEMA, "strict": True}
NOW = {"type": "function", "name": "now"}


def sent_events(text):
    """The events of a whole stream."""
    events = []
    for block in text.split("\n\n"):
        if block:
            first, second = block.split("\n")
            event = strict_json(second.removeprefix("data: "))
            assert first == f"event: {event['type']}"
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events):
    """Types without their common beginning, repeats once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]


def rendered(server):
    return server.engine.tokenizer.rendered


def test_a_response_has_what_was_asked_and_what_came(fake_server, fake_client):
    script(fake_server, "Hello there.")
    fields = {"input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9}
    response = fake_client.post(PATH, json=fields)
    body = response.json()
    assert response.headers["x-request-id"] == body["id"] and body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["store"], body["model"]) == ("response", "completed", False, "fake")
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []}]
    assert body["usage"] == {
        "input_tokens": 13,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
    }
    assert (body["metadata"], body["temperature"], body["top_p"]) == ({"a": "b"}, 0.5, 0.9)
    assert body["instructions"] == "Be brief." and body["error"] is None and body["incomplete_details"] is None
    params = fake_server.engine.submitted[-1]["params"]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, None)


@pytest.fixture
def fake_server(fake_server):
    """Its template refuses a system role; here it takes one."""
    encode = fake_server.engine.tokenizer.encode_chat

    def encode_chat(messages, *args, **kwargs):
        ids = encode([*messages[1:], messages[0]] if messages[0]["role"] == "system" else messages, *args, **kwargs)
        fake_server.engine.tokenizer.rendered["messages"] = messages
        return ids

    fake_server.engine.tokenizer.encode_chat = encode_chat
    return fake_server


def test_text_is_told_by_typed_events(fake_server, fake_client):
    script(fake_server, "Hello there.")
    events = sent_events(fake_client.post(PATH, json={"input": "hi", "stream": True}).text)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "output_item.done", "completed"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "Hello there."
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    whole = fake_client.post(PATH, json={"input": "hi"}).json()
    last = events[-1]["response"]
    for volatile in ("id", "created_at", "completed_at"):
        whole.pop(volatile), last.pop(volatile)
    assert whole["output"][0].pop("id") != last["output"][0].pop("id")
    assert whole == last


def test_calls_are_items_with_events_of_their_own(fake_server, fake_client):
    script(fake_server, f"{TWO}\nDone.")
    fields = {"input": "hi", "tools": [WEATHER, NOW]}
    events = sent_events(fake_client.post(PATH, json=fields | {"stream": True}).text)
    done = ["output_item.done"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *MESSAGE,
        *done,
        *(CALL + done) * 2,
        *MESSAGE,
        *done,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
    assert output[1]["name"] == "get_weather" and output[1]["arguments"] == ARGUMENTS
    assert output[1]["call_id"].startswith("call_") and output[1]["id"].startswith("fc_")
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]
    whole = fake_client.post(PATH, json=fields).json()["output"]
    for one, other in zip(whole, output, strict=True):
        one.pop("id"), other.pop("id"), one.pop("call_id", 0), other.pop("call_id", 0)
        assert one == other
    assert rendered(fake_server)["tools"][0]["function"]["parameters"] == SCHEMA


def test_malformed_calls_stay_text(fake_server, fake_client):
    script(fake_server, BROKEN)
    (item,) = fake_client.post(PATH, json={"input": "hi", "tools": [WEATHER]}).json()["output"]
    assert item["content"][0]["text"] == BROKEN


def test_a_cut_response_is_incomplete(fake_server, fake_client):
    script(fake_server, "Hello there.")
    fields = {"input": "hi", "max_output_tokens": 2}
    body = fake_client.post(PATH, json=fields).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete" and body["output"][0]["content"][0]["text"] == "Hello "
    events = sent_events(fake_client.post(PATH, json=fields | {"stream": True}).text)
    assert events[-1]["type"] == "response.incomplete"


def test_a_fault_in_a_stream_is_a_failed_response(fake_server, fake_client):
    fake_server.engine.fail_after = 2
    events = sent_events(fake_client.post(PATH, json={"input": "hi", "stream": True}).text)
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {
        "code": "server_error",
        "message": "the request failed: broken on purpose",
    }
    error_of(fake_client.post(PATH, json={"input": "hi"}), 500)
    fake_server.engine.fault = UnfollowableError("bad_words leaves no token after 2 output tokens")
    events = sent_events(fake_client.post(PATH, json={"input": "hi", "stream": True}).text)
    assert events[-1]["response"]["error"] == {"code": "invalid_prompt", "message": str(fake_server.engine.fault)}
    assert error_of(fake_client.post(PATH, json={"input": "hi"}), 400)["code"] == "unfollowable"


def test_items_become_messages(fake_server, fake_client):
    script(fake_server, "ok")
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see."}],
            "id": "m",
        },
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": ARGUMENTS, "id": "fc"},
        {"type": "function_call", "call_id": "b", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    ]
    assert fake_client.post(PATH, json={"input": items}).status_code == 200
    messages = rendered(fake_server)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert messages[2]["content"] == "Let me see."
    assert messages[2]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert messages[4] == {"role": "tool", "tool_call_id": "b", "content": "noon"}
    assert messages[5]["content"] == "" and messages[5]["tool_calls"][0]["id"] == "c"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (None, "got null"),
        ([], "got an empty list"),
        (5, "got int"),
        ([5], "input[0] must be an object"),
        ([{"type": "reasoning"}], "input[0].type is 'reasoning'"),
        ([{"type": 5}], "input[0].type is int"),
        ([{"type": "item_reference", "id": "m"}], "keeps no items"),
        ([{"role": "robot", "content": "x"}], "input[0].role is 'robot'"),
        ([{"role": "user"}], "input[0].content must be a string"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0] has type 'input_image'"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id must be"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}], "input[0].arguments must be"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id must be"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output must be"),
        ([{"role": "user", "content": "x"}] * 4097, "limit is 4096"),
    ],
)
def test_bad_input_is_refused_by_place(client, given, word):
    error = error_of(client.post(PATH, json={"input": given}), 400)
    assert word in error["message"] and error["param"] == "input"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no responses"),
        ({"conversation": "conv_1"}, "keeps no responses"),
        ({"background": True}, "keeps no responses"),
        ({"store": True}, "nothing is kept"),
        ({"prompt": {"id": "p"}}, "keeps no prompts"),
        ({"truncation": "auto"}, "truncate_prompt_tokens"),
        ({"include": ["message.output_text.logprobs"]}, "nothing to include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort is not supported"),
        ({"max_output_tokens": 0}, "must be at least 1"),
        ({"max_tokens": 5}, "field of /v1/chat/completions"),
        ({"messages": []}, "field of /v1/chat/completions"),
        ({"response_format": {"type": "text"}}, "field of /v1/chat/completions"),
        ({"n": 2}, "field of /v1/chat/completions"),
        ({"tools": [{"type": "web_search"}]}, "only tools of type function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name must have"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "needs tools"),
        ({"metadata": {"k": 5}}, "valid string"),
        ({"metadata": {str(i): "" for i in range(17)}}, "limit is 16"),
        ({"metadata": {"k": "x" * 513}}, "too long"),
        ({"text": {"format": {"type": "xml"}}}, "must be one of text, json_object, json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema must be"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, fields, word):
    for stream in (False, True):
        error = error_of(client.post(PATH, json={"input": "hi", "stream": stream} | fields), 400)
        assert word in error["message"] and error["param"] == next(iter(fields))


def test_values_that_ask_for_nothing_are_taken(client):
    fields = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": [],
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "previous_response_id": None,
        "user": "someone",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    assert client.post(PATH, json={"input": "hi", "max_output_tokens": 3} | fields).status_code == 200


def test_responses_are_not_kept(client):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        error = error_of(client.request(method, f"{PATH}/resp_1{path}"), 404)
        assert "keeps no responses" in error["message"] and error["code"] == "response_not_found"


def test_a_real_engine_answers_whole_and_streamed_alike(client, alive):
    fields = {"input": "hi", "temperature": 0, "max_output_tokens": 12, "ignore_eos": True}
    whole = client.post(PATH, json=fields).json()
    events = sent_events(client.post(PATH, json=fields | {"stream": True}).text)
    assert events[-1]["type"] == "response.incomplete"
    last = events[-1]["response"]
    assert whole["output"][0]["content"] == last["output"][0]["content"]
    assert whole["usage"]["output_tokens"] == last["usage"]["output_tokens"] == 12
    assert last["usage"]["input_tokens_details"]["cached_tokens"] in range(whole["usage"]["input_tokens"])
    alive()


def test_a_format_holds_for_the_text(client):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    closed = schema | {"additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "answer", "schema": closed, "strict": True}}
    body = client.post(PATH, json={"input": "hi", "text": text, "temperature": 1, "seed": 1}).json()
    assert type(json.loads(body["output"][0]["content"][0]["text"])["yes"]) is bool
    assert body["text"] == text


def test_the_openai_client_goes_through_a_whole_round(fake_server):
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as api:
        script(fake_server, ONE)
        conversation = [{"role": "user", "content": "How is the weather?"}]
        asked = {"model": "fake", "tools": [WEATHER, NOW]}
        response = api.responses.create(**asked, input=conversation)
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments) == {"city": 'Orléans "é"'}
        conversation += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        script(fake_server, "It is sunny.")
        assert api.responses.create(**asked, input=conversation).output_text == "It is sunny."
        assert rendered(fake_server)["messages"][1]["tool_calls"][0]["id"] == call.call_id
        script(fake_server, TWO)
        with api.responses.stream(**asked, input="again") as stream:
            seen = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= seen
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert final.output[1].parsed_arguments == {"city": 'Orléans "é"'}
        assert final.usage.input_tokens_details.cached_tokens == 0
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            api.responses.retrieve(final.id)
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            api.responses.create(model="fake", input="x", previous_response_id=final.id)
