"""The official `openai` client, unchanged, against the real server."""

import openai
import pytest


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_models(api):
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"


def test_chat_whole_and_streamed_are_the_same(api):
    settings = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    # Salts apart, or the second would find the first one's pages and say so in its usage.
    whole = api.chat.completions.create(**settings, top_logprobs=3, extra_body={"cache_salt": "whole"})
    assert whole.choices[0].finish_reason in ("length", "stop") and whole.usage.completion_tokens <= 12
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    text, usage, finish = "", None, None
    options = {"include_usage": True}
    streamed = api.chat.completions.create(
        **settings, stream=True, stream_options=options, extra_body={"cache_salt": "streamed"}
    )
    for chunk in streamed:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content and finish == whole.choices[0].finish_reason
    assert usage == whole.usage


def test_completions_whole_and_streamed_are_the_same(api):
    settings = {"model": "tiny", "prompt": ["abc", "de"], "temperature": 0, "max_tokens": 9, "n": 2, "echo": True}
    whole = api.completions.create(**settings)
    texts = {}
    for chunk in api.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_errors_are_the_clients_own_exceptions(api):
    with pytest.raises(openai.NotFoundError, match="gpt-7"):
        api.chat.completions.create(model="gpt-7", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="the model's chat template does not write them"):
        api.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_leaving_a_stream_early_ends_it(api, server):
    stream = api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    # The fixture checks that nothing is left running.
