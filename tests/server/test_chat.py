"""/v1/chat/completions: shape, template errors, BOS, content parts."""

import pytest

from jaxserve.loading import resolve_model
from jaxserve.testing.tiny import BOS_ID, CHATML, write_tiny_model
from jaxserve.text import load_tokenizer
from tests.server.running import choice_texts, error_of, events_of

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def chat(client, messages=(USER,), **body):
    request = {"messages": list(messages), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return client.post(URL, json=request | {"return_token_ids": True} | body)


@pytest.fixture
def use_template(server, tmp_path, monkeypatch):
    """`use_template(template, add_bos)`: the server's tokenizer gets another chat template."""

    def use(template, add_bos=False):
        write_tiny_model(tmp_path, chat_template=template, add_bos=add_bos)
        tokenizer = load_tokenizer(resolve_model(str(tmp_path)))
        monkeypatch.setattr(server.engine.engine, "_tokenizer", tokenizer)

    return use


def test_the_answer_has_every_field_of_the_openai_shape(client):
    answer = chat(client).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_a_stream_has_role_deltas_one_finish_and_done(client):
    whole = chat(client, n=2, temperature=1, seed=4).json()
    events = events_of(chat(client, n=2, temperature=1, seed=4, stream=True).text)
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"
    assert choice_texts(events) == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_logprobs_list_the_chosen_token_and_so_many_likeliest(client, top):
    answer = chat(client, logprobs=True, top_logprobs=top).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for entry, token_id in zip(content, answer["choices"][0]["token_ids"], strict=True):
        assert entry["bytes"] == [token_id] and entry["logprob"] <= 0
        values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert len(values) == (top or 0) and values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    "body", [{"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 5}, {"max_completion_tokens": 4}]
)
def test_fields_that_contradict_each_other_are_refused(client, body):
    error_of(chat(client, **body), 400)


def test_max_completion_tokens_is_max_tokens(client):
    answer = client.post(URL, json={"messages": [USER], "max_completion_tokens": 3, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_without_max_tokens_a_chat_may_fill_the_context(client):
    answer = client.post(URL, json={"messages": [USER], "ignore_eos": True, "temperature": 0}).json()
    assert answer["usage"]["total_tokens"] == 128 and answer["choices"][0]["finish_reason"] == "length"


def test_text_parts_are_joined_and_empty_content_is_accepted(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ids = [
        chat(client, [{"role": "user", "content": content}]).json()["prompt_token_ids"] for content in (parts, "a\nb")
    ]
    assert ids[0] == ids[1]
    assert chat(client, [{"role": "user", "content": ""}]).status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": 5},
        {"role": "tool", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]},
    ],
)
def test_content_that_is_not_text_is_refused_by_place(client, message):
    error = error_of(chat(client, [USER, message]), 400)
    assert "messages[1]" in error["message"] and error["param"] == "messages"


def test_developer_messages_are_system_messages(client):
    ids = [chat(client, [{"role": role, "content": "x"}, USER]).json() for role in ("developer", "system")]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_refuses_is_quoted(client, alive, use_template, stream):
    use_template(REFUSING)
    system = {"role": "system", "content": "x"}
    assert "System role not supported" in error_of(chat(client, [system, USER], stream=stream), 400)["message"]
    assert "Roles must alternate" in error_of(chat(client, [USER, USER], stream=stream), 400)["message"]
    assert chat(client, [USER]).json()["prompt_token_ids"] == list(b"hi")


def test_without_a_template_chat_is_refused_not_guessed(client, use_template):
    use_template(None)
    assert "chat template" in error_of(chat(client), 400)["message"]


@pytest.mark.parametrize("template", [CHATML, "<|bos|>" + CHATML])
def test_a_chat_prompt_has_exactly_one_bos(client, use_template, template):
    use_template(template, add_bos=True)
    ids = chat(client).json()["prompt_token_ids"]
    assert ids.count(BOS_ID) == 1 and ids[0] == BOS_ID


@pytest.mark.parametrize("path", [URL, "/tokenize"])
@pytest.mark.parametrize(
    "variables", [{"messages": []}, {"tools": []}, {"tools": [{"name": "f"}]}, {"add_generation_prompt": False}]
)
def test_template_variables_with_a_field_of_their_own_are_refused(client, alive, path, variables):
    error = error_of(client.post(path, json={"messages": [USER], "chat_template_kwargs": variables}), 400)
    assert error["param"] == "chat_template_kwargs" and next(iter(variables)) in error["message"]
    alive()


@pytest.mark.parametrize("path", [URL, "/tokenize"])
@pytest.mark.parametrize("name", ["self", "cls", "source", "variables", "special_tokens", "param", "converts", "a b"])
def test_any_other_name_is_a_template_variable(client, path, name):
    body = {"messages": [USER], "chat_template_kwargs": {name: 1}}
    if path == URL:
        body |= {"max_tokens": 1}
    assert client.post(path, json=body).status_code == 200


def test_template_variables_reach_the_template(client, use_template):
    use_template("{{ mood }}{{ messages[0]['content'] }}")
    assert chat(client, chat_template_kwargs={"mood": "glad "}).json()["prompt_token_ids"] == list(b"glad hi")


@pytest.mark.parametrize("path", [URL, "/tokenize"])
@pytest.mark.parametrize("value", [True, False])
def test_special_tokens_of_a_chat_are_the_templates_to_write(client, path, value):
    error = error_of(client.post(path, json={"messages": [USER], "add_special_tokens": value}), 400)
    assert error["param"] == "add_special_tokens"


def test_a_template_without_bos_gets_none_where_the_tokenizer_adds_none(client, use_template):
    use_template(CHATML, add_bos=False)
    assert BOS_ID not in chat(client).json()["prompt_token_ids"]
