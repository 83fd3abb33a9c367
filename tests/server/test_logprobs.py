"""Scores over HTTP are the same whole and streamed, echoed and asked for, cold and cached; and always strict JSON.

`tests/engine/test_logprobs.py` holds the engine's against the model. Two requests may run in batches of other shapes,
which in float32 moves a score by a few 1e-6: hence `TOLERANCE`.
"""

import pytest

from tests.server.running import error_of, events_of, strict_json
from tests.server.test_characters import DATA, TEXT, forcing

COMPLETIONS, CHAT = ROUTES = ("/v1/completions", "/v1/chat/completions")
TOLERANCE = 1e-4
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "seed": 5, "top_p": 0.95}
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def near(value):
    return pytest.approx(value, abs=TOLERANCE)


def post(client, path, **body):
    """The parsed answer; `stream`: its events."""
    base = {"prompt": "The sea"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    response = client.post(path, json=base | {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True} | body)
    assert response.status_code == 200, response.text
    assert not any(word in response.text for word in ("NaN", "Infinity"))
    return events_of(response.text) if body.get("stream") else strict_json(response.text)


def choices_of(client, path, **body):
    return post(client, path, **body)["choices"]


def joined(events, path):
    """Per choice the logprobs object and token ids of a stream, put together."""
    found = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            scores, ids = found.setdefault(choice["index"], ({}, []))
            ids += choice.get("token_ids", ())
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    scores.setdefault(name, []).extend(values)
    return found


def assert_same_completion_scores(got, want):
    assert got["tokens"] == want["tokens"] and got["text_offset"] == want["text_offset"]
    for name in ("token_logprobs", "top_logprobs"):
        assert len(got[name]) == len(want[name]) == len(want["tokens"])
        for a, b in zip(got[name], want[name], strict=True):
            assert a == (None if b is None else near(b))


def assert_same_chat_scores(got, want):
    assert len(got["content"]) == len(want["content"])
    for a, b in zip(got["content"], want["content"], strict=True):
        for one, other in zip([a, *a["top_logprobs"]], [b, *b["top_logprobs"]], strict=True):
            assert (one["token"], one["bytes"]) == (other["token"], other["bytes"])
            assert one["logprob"] == near(other["logprob"])


@SAMPLINGS
@pytest.mark.parametrize("count", [0, 1, 5])
def test_streamed_completions_have_the_scores_of_whole_ones(client, sampling, count):
    for echo in (False, True):
        body = {"prompt": ["The sea", "ab"], "n": 2, "logprobs": count, "echo": echo} | sampling
        whole = choices_of(client, COMPLETIONS, **body)
        streamed = joined(post(client, COMPLETIONS, **body, stream=True), COMPLETIONS)
        for choice in whole:
            scores, ids = streamed[choice["index"]]
            assert ids == choice["token_ids"]
            assert_same_completion_scores(scores, choice["logprobs"])


@SAMPLINGS
@pytest.mark.parametrize("count", [0, 1, 5])
def test_streamed_chats_have_the_scores_of_whole_ones(client, sampling, count):
    body = {"n": 2, "logprobs": True, "top_logprobs": count} | sampling
    whole = choices_of(client, CHAT, **body)
    streamed = joined(post(client, CHAT, **body, stream=True), CHAT)
    for choice in whole:
        scores, ids = streamed[choice["index"]]
        assert ids == choice["token_ids"] and len(ids) == len(scores["content"])
        assert_same_chat_scores(scores, choice["logprobs"])


def prompt_part(logprobs, length):
    return {name: values[:length] for name, values in logprobs.items()}


@pytest.mark.parametrize("count", [0, 3, 20])
def test_an_echoed_prompt_has_the_same_scores_whatever_follows_and_as_prompt_logprobs(client, count):
    text = "A prompt of several pages, forty-two bytes."
    size = len(text)
    body = {"prompt": text, "logprobs": count, "echo": True} | GREEDY
    (alone,) = choices_of(client, COMPLETIONS, **body, max_tokens=0)
    assert alone["token_ids"] == [] and len(alone["logprobs"]["tokens"]) == size
    for max_tokens, n in ((1, 1), (8, 1), (2, 3)):
        for choice in choices_of(client, COMPLETIONS, **body | {"n": n, "max_tokens": max_tokens}):
            assert len(choice["logprobs"]["tokens"]) == size + max_tokens
            assert_same_completion_scores(prompt_part(choice["logprobs"], size), alone["logprobs"])
    (asked,) = choices_of(client, COMPLETIONS, prompt=text, max_tokens=1, prompt_logprobs=count, **GREEDY)
    for at, (entry, echoed) in enumerate(
        zip(asked["prompt_logprobs"], alone["logprobs"]["token_logprobs"], strict=True)
    ):
        if at == 0:
            assert entry is None and echoed is None
            continue
        assert entry[str(ord(text[at]))]["logprob"] == near(echoed)
        assert len(entry) in (max(count, 1), count + 1)


@pytest.mark.parametrize("counts", [(3, 0), (0, 3), (2, 7)])
def test_echo_and_prompt_logprobs_each_show_as_many_as_they_ask_for(client, counts):
    logprobs, prompt_logprobs = counts
    body = {"logprobs": logprobs, "echo": True, "prompt_logprobs": prompt_logprobs, "max_tokens": 2} | GREEDY
    (choice,) = choices_of(client, COMPLETIONS, **body)
    for top in choice["logprobs"]["top_logprobs"][1:]:
        assert len(top) in (max(logprobs, 1), logprobs + 1)
    for entry in choice["prompt_logprobs"][1:]:
        assert len(entry) in (max(prompt_logprobs, 1), prompt_logprobs + 1)


@pytest.mark.parametrize("path", ROUTES)
def test_a_warm_cache_changes_no_score(client, path):
    fields = {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    long = "x" * 50 + " and so on"
    body = {"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
    body |= {"cache_salt": f"scores of {path}"} | fields | GREEDY
    cold, warm, scored = (post(client, path, **body, **more) for more in ({}, {}, {"prompt_logprobs": 0}))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm, scored)]
    assert cached[0] == cached[2] == 0 < cached[1], "a prompt whose scores are wanted is computed whole"
    same = assert_same_completion_scores if path == COMPLETIONS else assert_same_chat_scores
    for other in (warm, scored):
        assert other["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        same(other["choices"][0]["logprobs"], cold["choices"][0]["logprobs"])


RESTRICTIONS = [
    {"guided_regex": "[~%]{8}"},
    {"allowed_token_ids": [200, 201]},
    {"bad_words": list("abcdefgh~")},
    {"logit_bias": {"65": -100, "66": 100}},
    {"repetition_penalty": 100, "presence_penalty": 2},
    {"temperature": 100},
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", RESTRICTIONS, ids=str)
def test_what_restricts_the_choice_neither_moves_the_scores_nor_breaks_the_json(client, path, fields):
    asked = {"logprobs": 20} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    (free,) = choices_of(client, path, **asked, **GREEDY)
    (bound,) = choices_of(client, path, **asked, **GREEDY | {"seed": 1} | fields)
    (streamed,) = joined(post(client, path, **asked, **GREEDY | {"seed": 1} | fields, stream=True), path).values()
    assert streamed[1] == bound["token_ids"]
    if path == COMPLETIONS:
        assert_same_completion_scores(streamed[0], bound["logprobs"])
        tops = [sorted(each["logprobs"]["top_logprobs"][0].values())[-20:] for each in (free, bound)]
    else:
        assert_same_chat_scores(streamed[0], bound["logprobs"])
        tops = [[top["logprob"] for top in each["logprobs"]["content"][0]["top_logprobs"]] for each in (free, bound)]
    assert tops[0] == near(tops[1])


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -3e38])
@pytest.mark.parametrize("path", ROUTES)
def test_values_that_json_has_not_are_left_out_of_every_body(fake_server, fake_client, monkeypatch, path, value):
    """What a model that overflows gives: minus infinity is -9999, what is no number is null."""
    from jaxserve.core import Logprob
    from tests.server import fake_engine

    def scores(token_id, count):
        return {token_id: Logprob(value, 1, "x")} | {i: Logprob(value, i + 1, "y") for i in range(1, count)}

    monkeypatch.setattr(fake_engine, "_scores", scores)
    fields = {"logprobs": 3, "echo": True} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 3}
    wanted = None if value != value else -9999.0
    whole = post(fake_client, path, **fields, prompt_logprobs=2)
    (choice,) = whole["choices"]
    scored = choice if path == COMPLETIONS else whole
    entries = [entry for position in scored["prompt_logprobs"][1:] for entry in position.values()]
    assert entries and all(entry["logprob"] == wanted for entry in entries)
    (streamed,) = joined(post(fake_client, path, **fields, stream=True), path).values()
    for logprobs in (choice["logprobs"], streamed[0]):
        if path == COMPLETIONS:
            assert set(logprobs["token_logprobs"][7:]) == {wanted}
            assert all(set(top.values()) == {wanted} for top in logprobs["top_logprobs"][7:])
        else:
            assert all(entry["logprob"] == wanted for entry in logprobs["content"])
            assert all(top["logprob"] == wanted for entry in logprobs["content"] for top in entry["top_logprobs"])


def test_parts_of_characters_are_told_by_their_bytes(client):
    body = forcing(DATA) | {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    (choice,) = choices_of(client, CHAT, **body)
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == TEXT
    assert bytes(byte for entry in content for byte in entry["bytes"]) == TEXT.encode()
    assert [entry["token"] for entry in content] == [f"bytes:\\x{byte:02x}" for byte in DATA]
    for entry in content:
        for top in entry["top_logprobs"]:
            # One byte of 128 or more is no character; special tokens have their names' bytes.
            part = len(top["bytes"]) == 1 and top["bytes"][0] >= 128
            assert top["token"] == (f"bytes:\\x{top['bytes'][0]:02x}" if part else bytes(top["bytes"]).decode())
    (choice,) = choices_of(client, COMPLETIONS, **forcing(DATA), prompt="x", logprobs=20)
    assert choice["logprobs"]["tokens"] == [f"bytes:\\x{byte:02x}" for byte in DATA]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 2.5}, "top_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_by_name(client, path, fields, param):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    assert param in error_of(client.post(path, json=body | fields), 400)["message"]
