"""Stop strings, over HTTP, against the text of a run without them."""

import pytest

from tests.server.running import choice_texts, error_of, events_of

URL = "/v1/completions"
BODY = {"prompt": "The sea", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def text(tiny_server):
    """Greedy text; every token is a byte, so a piece of three characters crosses three tokens."""
    with tiny_server.client() as client:
        return client.post(URL, json=BODY).json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def piece(text):
    """A piece from the text's middle that is plain ASCII."""
    for start in range(10, len(text) - 3):
        piece = text[start : start + 3]
        if piece.isascii() and text.find(piece) == start:
            return piece
    raise AssertionError(f"no usable piece in {text!r}")


def run(client, stream, **body):
    """Text, finish reason, stop reason and pieces."""
    response = client.post(URL, json=BODY | body | {"stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"], [choice["text"]]
    events = events_of(response.text)
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return (
        choice_texts(events)[0],
        choices[-1]["finish_reason"],
        choices[-1]["stop_reason"],
        [c["text"] for c in choices],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_three_tokens_cuts_at_its_first_occurrence(client, text, piece, stream, include):
    got, finish, reason, pieces = run(client, stream, stop=piece, include_stop_str_in_output=include)
    assert got == text[: text.find(piece) + (len(piece) if include else 0)]
    assert finish == "stop" and reason == piece
    # No delta shows a part of it: what was sent before the end never passes the cut.
    assert len("".join(pieces)) == len(got)


def test_of_two_stop_strings_the_first_in_the_text_wins(client, text, piece):
    earlier = text[2:5]
    got, _, reason, _ = run(client, False, stop=[piece, earlier])
    assert got == text[: text.find(earlier)] and reason == earlier


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [[], None])
def test_no_stop_strings_change_nothing(client, text, stop, stream):
    assert run(client, stream, stop=stop)[:2] == (text, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(client, stop, stream):
    assert "stop" in error_of(client.post(URL, json=BODY | {"stop": stop, "stream": stream}), 400)["message"]


def test_stop_text_in_the_prompt_does_not_fire(client, text):
    assert run(client, False, stop="The sea")[0] == text
    assert run(client, True, stop="a" + text[0])[0] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["length", "stop id", "eos"])
def test_held_back_text_is_given_at_the_end(client, text, stream, ending):
    # The stop string's beginning is the text's end, so the end is held back until it is certain.
    body, expected = {}, text
    if ending == "stop id":
        last = next(i for i in range(20, len(text)) if text[i].isascii() and text.find(text[i]) == i)
        body, expected = {"stop_token_ids": [ord(text[last])]}, text[:last]
    if ending == "eos":
        body = {"min_tokens": 12, "logit_bias": {"257": 100}, "ignore_eos": False}
        expected = run(client, False, **body)[0]
        assert expected
    got, _, _, _ = run(client, stream, stop=expected[-2:] + "\x00", **body)
    assert got == expected


def test_streamed_text_lags_by_less_than_the_stop_string(client, text):
    stop = text[-2:] + "\x00"
    response = client.post(URL, json=BODY | {"stream": True, "stop": stop, "return_token_ids": True})
    shown = tokens = 0
    for event in events_of(response.text)[:-1]:
        (choice,) = event["choices"]
        shown += len(choice["text"].encode())
        tokens += len(choice["token_ids"])
        # A byte-level vocabulary also holds back up to three bytes of a character.
        assert tokens - shown < len(stop) + 3
