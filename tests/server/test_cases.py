"""SMP-2, LGP-1, API-2, API-7: what went wrong elsewhere with choices, logprobs, batches and grammars."""

import json
import math
import threading

import pytest

from tests.server.running import RunningServer, choice_texts, error_of, events_of, strict_json

URL = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}


def complete(client, **body):
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def test_smp_2_choices_come_once_each_repeat_and_join(client):
    body = {"prompt": "The sea", "n": 4, "temperature": 1, "seed": 5, "max_tokens": 40}
    body |= {"stop_token_ids": list(range(60, 90)), "return_token_ids": True}  # they end at uneven lengths
    runs = [complete(client, **body)["choices"] for _ in range(2)]
    for choices in runs:
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    tokens = [[choice["token_ids"] for choice in choices] for choices in runs]
    assert tokens[0] == tokens[1]
    assert len({tuple(each) for each in tokens[0]}) > 1 and len({len(each) for each in tokens[0]}) > 1
    for _ in range(2):
        events = events_of(client.post(URL, json=body | {"stream": True}).text)
        assert choice_texts(events) == {choice["index"]: choice["text"] for choice in runs[0]}
        pieces = {index: [] for index in range(4)}
        finishes = []
        for event in events[:-1]:
            (choice,) = event["choices"]
            pieces[choice["index"]] += choice["token_ids"]
            finishes += [choice["index"]] if choice["finish_reason"] else []
        assert pieces == dict(enumerate(tokens[0])) and sorted(finishes) == [0, 1, 2, 3]


def test_lgp_1_completions_logprobs_are_sorted_counted_and_strict_json(client):
    body = {"prompt": "The sea", "max_tokens": 6, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    for count in (0, 1, 5, 20):
        (choice,) = complete(client, **body, top_k=1, logprobs=count)["choices"]
        logprobs = choice["logprobs"]
        for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            assert math.isfinite(chosen) and list(top.values()) == sorted(top.values(), reverse=True)
            assert chosen in top.values() and max(count, 1) <= len(top) <= count + 1
    for count in (21, 265):
        assert "logprobs" in error_of(client.post(URL, json=body | {"logprobs": count}), 400)["message"]


def test_lgp_1_zero_top_logprobs_in_chat_means_the_chosen_token_alone(client):
    url = "/v1/chat/completions"
    for top in (0, 1, 20):
        answer = strict_json(client.post(url, json=CHAT | {"logprobs": True, "top_logprobs": top}).text)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 4 and all(len(entry["top_logprobs"]) == top for entry in content)
    assert client.post(url, json=CHAT | {"logprobs": False}).json()["choices"][0]["logprobs"] is None
    for top in (21, 265):
        error_of(client.post(url, json=CHAT | {"logprobs": True, "top_logprobs": top}), 400)


def test_lgp_1_logprobs_are_of_the_raw_distribution_whatever_the_sampling(client):
    body = {"prompt": "The sea", "max_tokens": 1, "logprobs": 20, "ignore_eos": True, "seed": 3}
    tops = []
    for sampling in ({"temperature": 0.1}, {"temperature": 2}, {"top_k": 1}, {"logit_bias": {"65": 50}}):
        (choice,) = complete(client, **body, **sampling)["choices"]
        likeliest = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:20]
        tops.append(likeliest)
    assert all(top == pytest.approx(tops[0], abs=1e-5) for top in tops)


@pytest.fixture(scope="module")
def six_slots(make_tiny_engine):
    """A client of a server on which all six choices of the case run at once."""
    engine = make_tiny_engine(max_num_seqs=6, decode_buckets=(6,))
    server = RunningServer(lambda: engine)
    with server.client() as client:
        yield client
    server.stop()


def prompts_of_which_the_last_ends_first(client):
    """Three prompts, and a stop id that the greedy output of the last alone has at its beginning."""
    first = ["a prompt of more than sixteen characters", "another prompt of some forty characters"]

    def greedy(prompt):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return complete(client, **body)["choices"][0]["token_ids"]

    others = {token for prompt in first for token in greedy(prompt)}
    for number in range(50):
        last = f"the last prompt, number {number:02d}"
        early = [token for token in greedy(last)[:3] if token not in others]
        if early:
            return [*first, last], early[0]
    raise AssertionError("no prompt of fifty ends before the others")


@pytest.mark.parametrize("form", ["strings", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_api_2_choices_are_in_the_order_of_prompts_and_usage_sums_them(six_slots, form, stream):
    prompts, stop = prompts_of_which_the_last_ends_first(six_slots)
    texts = prompts
    if form == "ids":
        prompts = [list(prompt.encode()) for prompt in prompts]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"stop_token_ids": [stop], "cache_salt": f"{form} {stream}", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    def ask():
        response = six_slots.post(URL, json=body)
        if not stream:
            answer = strict_json(response.text)
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            return {choice["index"]: choice["text"] for choice in answer["choices"]}, answer["usage"]
        events = events_of(response.text)
        return choice_texts(events), events[-2]["usage"]

    found, usage = ask()
    for index, text in found.items():
        assert text.startswith(texts[index // 2])
    assert all(found[2 * i] == found[2 * i + 1] for i in range(3))
    assert usage["prompt_tokens"] == sum(map(len, texts))
    again, usage = ask()
    assert again == found
    # Full pages of 16, the last token being computed again.
    shared = sum((len(text) - 1) // 16 * 16 for text in texts)
    assert usage["prompt_tokens_details"]["cached_tokens"] == shared > 0


BAD_GRAMMARS = [
    {"guided_regex": "("},
    {"guided_json": {"type": "no such type"}},
    {"guided_grammar": "root ::= ("},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}},
    {"response_format": {"type": "no such format"}},
]


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
def test_api_7_a_bad_grammar_is_a_400_and_its_neighbours_are_as_alone(server, client, alive, path):
    neighbour = {"prompt": "The sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    solo = complete(client, **neighbour)["choices"][0]["text"]
    answers = []

    def run():
        with server.client() as other:
            answers.append(complete(other, **neighbour)["choices"][0]["text"])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    body = CHAT if "chat" in path else {"prompt": "a", "max_tokens": 40}
    for grammar in BAD_GRAMMARS:
        for stream in (False, True):
            error_of(client.post(path, json=body | grammar | {"stream": stream}), 400)
    for thread in threads:
        thread.join(30)
    assert answers == [solo, solo]
    alive()


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2, "maxLength": 4}, "rank": {"enum": [1, 2]}},
    "required": ["city", "rank"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"type": "string", "minLength": 50}, "minItems": 9}
BLANKS = {str(blank): 100 for blank in b" \t\n\r"}
"""A `logit_bias` of a model that would write blanks for ever."""


def bound_output(client, path, stream, **fields):
    """Text, ids and reason of an output of at most 40 tokens."""
    body = ({"messages": CHAT["messages"]} if "chat" in path else {"prompt": "hi"}) | {"temperature": 0}
    body |= {"max_tokens": 40, "return_token_ids": True, "stream": stream} | fields
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = strict_json(response.text)["choices"]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        return text, choice["token_ids"], choice["finish_reason"]
    events = events_of(response.text)
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return choice_texts(events)[0], [i for choice in choices for i in choice.get("token_ids", ())], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
def test_api_7_an_output_longer_than_max_tokens_ends_there_for_its_length(client, alive, path, stream):
    formatted = {"type": "json_schema", "json_schema": {"name": "long", "schema": LONG}}
    for fields in ({"guided_json": LONG}, {"response_format": formatted}, {"guided_regex": "[a-z]+"}):
        text, ids, reason = bound_output(client, path, stream, **fields, logit_bias={"256": -100, "259": -100})
        assert (len(ids), reason) == (40, "length") and bytes(ids).decode("utf-8", "replace") == text
        assert text.lstrip().startswith("[") or text.isalpha()
    alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
def test_api_7_blanks_for_ever_end_with_max_tokens_or_are_not_allowed(client, alive, path, stream):
    text, ids, reason = bound_output(client, path, stream, guided_json=PLACE, logit_bias=BLANKS)
    assert (len(ids), reason) == (40, "length") and text.count(" ") + text.count("\n") > 10
    assert '{"city"'.startswith("".join(text.split())), text
    once = {"guided_json": PLACE, "guided_whitespace_pattern": "[ ]?"}
    none = {"structured_outputs": {"json": PLACE, "disable_any_whitespace": True}}
    for fields in (once, none):
        text, ids, reason = bound_output(client, path, stream, **fields, logit_bias=BLANKS)
        assert reason == "stop" and len(ids) < 40
        assert set(json.loads(text)) == {"city", "rank"}, text
    alive()


UNSUPPORTED = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"$ref": "https://example.com/other.json"},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "format": "no such format"},
    {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "string"}}}},
]


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
@pytest.mark.parametrize("schema", UNSUPPORTED, ids=str)
def test_api_7_what_a_grammar_cannot_hold_is_a_400_never_left_out(client, alive, path, schema):
    body = CHAT if "chat" in path else {"prompt": "a", "max_tokens": 40}
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"guided_json": schema}, {"response_format": formatted}):
        for stream in (False, True):
            error = error_of(client.post(path, json=body | fields | {"stream": stream}), 400)
            assert "cannot be followed" in error["message"] and error["param"] == next(iter(fields))
    alive()


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
def test_api_7_neighbours_of_bound_and_failing_outputs_are_as_alone(server, client, path):
    neighbour = {"prompt": "The sea", "max_tokens": 60, "temperature": 1, "seed": 4, "ignore_eos": True}
    solo = complete(client, **neighbour)["choices"][0]["text"]
    answers = []

    def run():
        with server.client() as other:
            answers.append(complete(other, **neighbour)["choices"][0]["text"])

    thread = threading.Thread(target=run)
    thread.start()
    bound = bound_output(client, path, False, guided_json=LONG)
    nothing_left = {"guided_regex": "a[ab]+", "allowed_token_ids": [97, 99], "bad_words": ["aa"]}
    error_of(client.post(path, json=(CHAT if "chat" in path else {"prompt": "hi"}) | nothing_left), 400)
    thread.join(30)
    assert answers == [solo] and bound_output(client, path, False, guided_json=LONG) == bound
