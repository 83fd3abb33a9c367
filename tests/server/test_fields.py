"""Barred tokens, cut prompts, running usage, and chats whose last message goes on."""

import pytest

from tests.server.running import error_of, events_of

ROUTES = ("/v1/completions", "/v1/chat/completions")
SETTINGS = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


def body_of(path, text="The sea"):
    return SETTINGS | ({"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text})


def token_ids(client, path, **fields):
    response = client.post(path, json=body_of(path) | fields)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 2, "seed": 3, "n": 4}, {"top_k": 20, "top_p": 0.99, "seed": 1}]
)
def test_only_allowed_tokens_are_sampled(client, path, sampling):
    allowed = [65, 70, 75]
    # A repetition penalty multiplies what is negative: what is barred must stay out of reach.
    for more in ({}, {"repetition_penalty": 0.01}, {"logit_bias": {"66": 100, "70": 5}}, {"min_tokens": 12}):
        for ids in token_ids(client, path, allowed_token_ids=allowed, **sampling, **more):
            assert len(ids) == 12 and set(ids) <= set(allowed)
    (one,) = token_ids(client, path, allowed_token_ids=[70], temperature=1)
    assert one == [70] * 12


def test_all_allowed_is_none_barred_and_neighbours_are_untouched(client):
    path = ROUTES[0]
    (plain,) = token_ids(client, path, temperature=0)
    assert token_ids(client, path, temperature=0, allowed_token_ids=list(range(264))) == [plain]
    assert token_ids(client, path, temperature=0, allowed_token_ids=plain) == [plain]
    token_ids(client, path, temperature=0, allowed_token_ids=[70], n=4)  # every slot was that one's
    assert token_ids(client, path, temperature=0) == [plain]


@pytest.mark.parametrize("path", ROUTES)
def test_bad_words_are_never_sampled_and_what_is_left_is_as_before(client, path):
    (plain,) = token_ids(client, path, temperature=0)
    words = sorted({chr(i) for i in plain if 33 <= i < 127}) or ["a"]
    (held,) = token_ids(client, path, temperature=0, bad_words=words)
    assert not {ord(word) for word in words} & set(held)
    # The same as barring their ids by hand.
    others = [i for i in range(264) if chr(i) not in words]
    assert token_ids(client, path, temperature=0, allowed_token_ids=others) == [held]


@pytest.mark.parametrize("path", ROUTES)
def test_bad_words_of_several_tokens_never_stand_in_an_output(client, path):
    allowed = {"allowed_token_ids": list(b"abc")}
    words = ["aa", "bb", "cc", "abc"]
    for sampling in ({"temperature": 0}, {"temperature": 2, "seed": 1, "n": 4}):
        assert any(any(word.encode() in bytes(ids) for word in words) for ids in token_ids(client, path, **allowed))
        held = token_ids(client, path, bad_words=words, **allowed, **sampling)
        for ids in held:
            assert len(ids) == 12 and not any(word.encode() in bytes(ids) for word in words)
        body = body_of(path) | allowed | {"bad_words": words, "stream": True} | sampling
        pieces = {}
        for event in events_of(client.post(path, json=body).text)[:-1]:
            for choice in event["choices"]:
                pieces[choice["index"]] = pieces.get(choice["index"], []) + choice.get("token_ids", [])
        assert [pieces[index] for index in range(len(held))] == held


@pytest.mark.parametrize("path", ROUTES)
def test_words_that_leave_nothing_fail_their_request_alone(client, alive, path):
    body = body_of(path) | {"allowed_token_ids": [97, 98], "bad_words": ["aa", "ab", "ba", "bb"], "temperature": 0}
    error = error_of(client.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("unfollowable", "bad_words")
    assert error["message"] == "bad_words and allowed_token_ids leave no token after 1 output tokens"
    last = events_of(client.post(path, json=body | {"stream": True}).text)[-1]
    assert last == {"error": error}
    alive()


def test_the_bars_hold_for_every_choice_and_prompt(client):
    body = SETTINGS | {"prompt": ["ab", "cd"], "n": 2, "temperature": 1.5, "allowed_token_ids": list(range(60, 90))}
    for choice in client.post(ROUTES[0], json=body | {"bad_words": ["A", "B"]}).json()["choices"]:
        assert set(choice["token_ids"]) <= set(range(60, 90)) - {65, 66}


@pytest.mark.parametrize(
    "prompt", ["abcdefgh", list(b"abcdefgh"), "x" * 300 + "abcdefgh", [65] * 300 + list(b"abcdefgh")]
)
def test_truncate_prompt_tokens_keeps_the_last_ones(client, prompt):
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    cut = client.post(ROUTES[0], json=fields | {"truncate_prompt_tokens": 5, "echo": True}).json()
    whole = client.post(ROUTES[0], json=fields | {"prompt": "defgh", "echo": True}).json()
    assert cut["choices"] == whole["choices"] and cut["usage"]["prompt_tokens"] == 5


def test_truncation_to_what_fits_leaves_room_for_the_output(client):
    for prompt, fields, want in (
        ("x" * 300, {"max_tokens": 20}, 108),
        ("x" * 300, {}, 112),
        ("x" * 300, {"min_tokens": 30, "max_tokens": 30}, 98),
        ("x" * 50, {"max_tokens": 20}, 50),
    ):
        body = {"prompt": prompt, "truncate_prompt_tokens": -1, "ignore_eos": True} | fields
        usage = client.post(ROUTES[0], json=body).json()["usage"]
        assert usage["prompt_tokens"] == want and usage["completion_tokens"] == fields.get("max_tokens", 16)
    chat = {"messages": [{"role": "user", "content": "x" * 300}], "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = client.post(ROUTES[1], json=chat).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (127, 1)
    assert client.post(ROUTES[1], json=chat | {"truncate_prompt_tokens": 9}).json()["usage"]["prompt_tokens"] == 9


def test_without_it_a_long_prompt_is_refused(client):
    error_of(client.post(ROUTES[0], json={"prompt": "x" * 300}), 400)
    error_of(client.post(ROUTES[0], json={"prompt": [65] * 300}), 400)


@pytest.mark.parametrize("path", ROUTES)
def test_continuous_usage_grows_with_every_chunk_up_to_the_last(client, path):
    body = body_of(path) | {"stream": True, "n": 2, "temperature": 1, "seed": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(client.post(path, json=body | {"stream_options": options}).text)
    *chunks, last, done = events
    counts = [event["usage"]["completion_tokens"] for event in chunks]
    assert done == "[DONE]" and counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 24
    for event in chunks:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
    plain = events_of(client.post(path, json=body | {"stream_options": {"include_usage": True}}).text)
    assert all(event["usage"] is None for event in plain[:-2])


CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The capital of France is "}]


def rendered(client, messages, **fields):
    ids = client.post("/tokenize", json={"messages": messages} | fields).json()["tokens"]
    return client.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_continue_final_message_leaves_the_last_turn_open(client):
    turn = rendered(client, CONVERSATION, add_generation_prompt=False)
    open_ = rendered(client, CONVERSATION, continue_final_message=True)
    assert open_.endswith("The capital of France is ") and turn.startswith(open_) and len(turn) > len(open_)
    assert rendered(client, CONVERSATION).startswith(turn), "by default another turn is opened"
    chat = {"messages": CONVERSATION, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 3}
    answer = client.post(ROUTES[1], json=chat | {"return_token_ids": True, "temperature": 0}).json()
    assert bytes(i for i in answer["prompt_token_ids"] if i < 256) and not answer["choices"][0]["message"][
        "content"
    ].startswith("The capital")
    ids = client.post("/tokenize", json={"messages": CONVERSATION, "continue_final_message": True}).json()["tokens"]
    assert answer["prompt_token_ids"] == ids


def test_an_empty_last_message_may_be_continued(client):
    messages = [CONVERSATION[0], {"role": "assistant", "content": ""}]
    assert rendered(client, messages, continue_final_message=True) == rendered(client, messages[:1])


@pytest.mark.parametrize(
    ("messages", "fields", "word"),
    [
        (CONVERSATION, {"add_generation_prompt": True}, "both true"),
        (CONVERSATION[:1], {}, "its role is user"),
        (CONVERSATION, {"chat_template_kwargs": {"continue_final_message": True}}, "field of the request"),
    ],
)
@pytest.mark.parametrize("path", [ROUTES[1], "/tokenize"])
def test_what_cannot_be_continued_is_refused(client, path, messages, fields, word):
    body = {"messages": messages, "continue_final_message": True} | fields
    error = error_of(client.post(path, json=body), 400)
    assert word in error["message"] and error["param"] in ("continue_final_message", "chat_template_kwargs")


CHAT_FIELDS = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
}


@pytest.mark.parametrize(("name", "value"), CHAT_FIELDS.items())
def test_fields_of_messages_are_refused_beside_a_prompt(client, name, value):
    error = error_of(client.post("/tokenize", json={"prompt": "a", name: value}), 400)
    assert error["param"] == name and "goes with messages" in error["message"]


def test_fields_of_messages_that_ask_for_nothing_are_taken_beside_a_prompt(client):
    body = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False}
    assert client.post("/tokenize", json=body | {"prompt": "a"}).json()["tokens"] == [97]
