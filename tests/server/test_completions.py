"""/v1/completions: lengths, echo, logprobs, several prompts and choices, sampling at its edges."""

import math

import pytest

from tests.server.running import choice_texts, error_of, events_of, strict_json, until

MAX_MODEL_LEN = 128
URL = "/v1/completions"


def complete(client, **body):
    response = client.post(URL, json={"temperature": 0, "return_token_ids": True} | body)
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def stream(client, **body):
    with client.stream("POST", URL, json={"temperature": 0, "stream": True} | body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.read().decode())


def test_the_answer_has_every_field_of_the_openai_shape(client):
    answer = complete(client, prompt="The sea", max_tokens=3, ignore_eos=True)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["prompt_token_ids"] == list(b"The sea") and len(choice["token_ids"]) == 3
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 10


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
def test_a_prompt_near_the_context_length_runs_or_is_refused_naming_both(client, alive, length):
    """CHK-2."""
    body = {"prompt": [65] * length, "max_tokens": 1, "temperature": 0}
    response = client.post(URL, json=body)
    if length < MAX_MODEL_LEN:
        assert response.json()["usage"]["completion_tokens"] == 1
    else:
        message = error_of(response, 400)["message"]
        assert str(length) in message and str(MAX_MODEL_LEN) in message and "-" not in message
    alive()


def test_without_max_tokens_the_output_ends_with_the_context(client):
    """CHK-2."""
    answer = complete(client, prompt=[65] * (MAX_MODEL_LEN - 3), ignore_eos=True)
    assert len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_a_completion_has_sixteen(client):
    assert complete(client, prompt="ab", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_an_explicit_max_tokens_past_the_context_is_refused(client, alive):
    """CHK-2."""
    body = {"prompt": [65] * 100, "max_tokens": MAX_MODEL_LEN - 100 + 1}
    message = error_of(client.post(URL, json=body), 400)["message"]
    assert "100" in message and "29" in message and str(MAX_MODEL_LEN) in message
    alive()


@pytest.mark.parametrize("length", [1, 5, MAX_MODEL_LEN])
def test_max_tokens_zero_scores_the_prompt(client, alive, length):
    """CHK-2."""
    prompt = [65 + i % 26 for i in range(length)]
    answer = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [] and choice["text"] == bytes(prompt).decode()
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == length and scores[0] is None and all(math.isfinite(s) and s < 0 for s in scores[1:])
    assert answer["usage"]["completion_tokens"] == 0
    alive()


def test_max_tokens_zero_without_echo_gives_nothing(client):
    answer = complete(client, prompt="abc", max_tokens=0)
    assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "length"


def test_echo_puts_prompt_and_output_in_one_text_with_offsets(client):
    answer = complete(client, prompt="abc", max_tokens=4, echo=True, logprobs=2, ignore_eos=True)
    (choice,) = answer["choices"]
    assert choice["text"].startswith("abc")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"] and logprobs["text_offset"][:4] == [0, 1, 2, 3]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 7
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


@pytest.mark.parametrize("as_ids", [False, True])
def test_text_offsets_count_delivered_text_over_characters_of_several_tokens(client, as_ids):
    text = "ď世😀!"
    prompt = list(text.encode()) if as_ids else text
    choice = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_streamed_echo_equals_the_whole_one(client):
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "echo": True, "logprobs": 1, "seed": 3}
    whole = complete(client, temperature=1, **body)
    events = stream(client, **body | {"temperature": 1, "return_token_ids": True})
    assert choice_texts(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        pieces = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            joined = [value for piece in pieces for value in piece["logprobs"][name]]
            if name in ("tokens", "text_offset"):
                assert joined == values
            assert len(joined) == len(values)
        assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_hold_the_chosen_token_and_the_likeliest(client, count):
    answer = complete(client, prompt="The sea", max_tokens=4, logprobs=count, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        values = list(top.values())
        assert values == sorted(values, reverse=True)
        assert len(top) == max(count, 1)  # greedy: the chosen token is the likeliest
        assert chosen == values[0]


def test_logprobs_do_not_depend_on_temperature_or_filters(client):
    bodies = [{"temperature": 0.1, "top_k": 1}, {"temperature": 0}, {"temperature": 2, "top_p": 0}]
    scores = [complete(client, prompt="ab", max_tokens=3, logprobs=5, **body)["choices"][0] for body in bodies]
    for other in scores[1:]:
        assert other["logprobs"]["token_logprobs"] == pytest.approx(scores[0]["logprobs"]["token_logprobs"], abs=1e-4)


def test_an_impossible_alternative_is_still_strict_json(client):
    body = {"prompt": "ab", "max_tokens": 2, "top_k": 1, "logprobs": 5, "logit_bias": {"65": -100}}
    complete(client, **body)


def test_prompt_logprobs_start_with_null(client):
    answer = complete(client, prompt="abc", max_tokens=1, prompt_logprobs=1)
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and [str(ord(c)) in s for c, s in zip("bc", scores[1:], strict=True)] == [True, True]


def test_choices_are_numbered_by_prompt_then_choice(client):
    # The last prompt is shortest in output, so it finishes first.
    prompts = [[65, 66, 67], [97, 98], [48]]
    answer = complete(client, prompt=prompts, n=2, max_tokens=6, temperature=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
    assert answer["usage"]["prompt_tokens"] == 6


def test_several_choices_differ_repeat_and_join_per_index(client):
    body = {"prompt": "The sea", "n": 4, "temperature": 1, "seed": 5, "max_tokens": 20}
    whole = complete(client, **body)["choices"]
    assert sorted(choice["index"] for choice in whole) == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole}) > 1
    assert [c["token_ids"] for c in complete(client, **body)["choices"]] == [c["token_ids"] for c in whole]
    events = stream(client, **body)
    assert choice_texts(events) == {choice["index"]: choice["text"] for choice in whole}
    finishes = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2, 3]


@pytest.mark.parametrize("setting", [{"temperature": t} for t in (1e-6, 1e-5, 1e-4, 1e-3)])
def test_tiny_temperatures_are_greedy(client, setting, baseline):
    """SMP-4."""
    check_tokens(client, baseline, setting)


@pytest.mark.parametrize("setting", [{"top_p": 0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}])
def test_the_tightest_filters_are_greedy(client, setting, baseline):
    """SMP-4."""
    check_tokens(client, baseline, {"temperature": 1, "seed": 1} | setting)


def check_tokens(client, expected, setting):
    answer = complete(client, prompt="The sea", max_tokens=len(expected), ignore_eos=True, **setting)
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("setting", [{"top_k": -1}, {"top_k": 0}, {"top_k": 264}, {"top_k": 10**7}, {"top_p": 1}])
def test_filters_that_keep_everything_change_nothing(client, setting):
    """SMP-4."""
    body = {"prompt": "The sea", "temperature": 1, "seed": 7, "max_tokens": 12}
    assert complete(client, **body | setting)["choices"] == complete(client, **body)["choices"]


def test_a_prompt_as_text_and_as_ids_is_the_same_prompt(client):
    assert (
        complete(client, prompt="abc", max_tokens=5)["choices"]
        == complete(client, prompt=[97, 98, 99], max_tokens=5)["choices"]
    )


def test_a_refused_prompt_of_several_cancels_the_others(server, client):
    body = {"prompt": [[65], [66], [9999]], "max_tokens": 100}
    error_of(client.post(URL, json=body), 400)
    until(lambda: server.engine.engine.clean, 2, "idle-clean")
