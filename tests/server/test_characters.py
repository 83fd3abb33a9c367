"""Characters of several tokens, over HTTP: the tiny model's tokens are single bytes."""

import json

import pytest

from tests.server.running import RunningServer, choice_texts, events_of
from tests.text.vocabularies import SENTENCEPIECE_BYTE_BASE, sentencepiece

URL = "/v1/completions"
TEXT = "ď世😀"
DATA = list(TEXT.encode())


def forcing(output):
    """A request whose greedy output is these ids, which must differ.

    Each has a bias well above the next one's, and the repetition penalty takes it out once it was chosen.
    """
    assert len(set(output)) == len(output)
    bias = {str(token_id): 100 - 8 * index for index, token_id in enumerate(output)}
    return {
        "max_tokens": len(output),
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": bias,
        "repetition_penalty": 100,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("split", range(len(DATA)))
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_text_forced_byte_by_byte_streams_in_whole_characters(client, split, logprobs):
    """`split` bytes are the prompt's, so it may end inside a character."""
    prompt, output = [ord("x"), *DATA[:split]], DATA[split:]
    body = {"prompt": prompt, "logprobs": logprobs} | forcing(output)
    whole = client.post(URL, json=body).json()["choices"][0]
    assert whole["token_ids"] == output
    events = events_of(client.post(URL, json=body | {"stream": True}).text)
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    before = bytes(prompt).decode("utf-8", "ignore")
    expected = bytes(prompt + output).decode().removeprefix(before)
    assert choice_texts(events)[0] == whole["text"] == expected
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == output
    # Every delta is whole characters of the text, never a replacement for half of one.
    pieces = [choice["text"] for choice in choices if choice["text"]]
    assert len(pieces) <= len(expected) and all("\ufffd" not in piece for piece in pieces)
    assert all(piece.encode().decode() == piece for piece in pieces)
    if logprobs is not None:
        delivered = [
            len(bytes(prompt + output[:index]).decode("utf-8", "ignore").removeprefix(before))
            for index in range(len(output))
        ]
        assert whole["logprobs"]["text_offset"] == delivered
        assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == delivered


@pytest.mark.parametrize("length", [1, 3, 6, 8])
def test_an_output_that_ends_inside_a_character_gives_one_replacement_at_the_end(client, length):
    output = DATA[:length]
    body = {"prompt": "x"} | forcing(output)
    expected = bytes(output).decode("utf-8", "replace")
    assert expected.count("\ufffd") == 1
    whole = client.post(URL, json=body).json()["choices"][0]
    assert whole["token_ids"] == output and whole["text"] == expected
    assert choice_texts(events_of(client.post(URL, json=body | {"stream": True}).text))[0] == expected


@pytest.fixture(scope="module")
def spaced(make_tiny_engine, tmp_path_factory):
    """The tokenizer and a client of a server whose texts are SentencePiece's."""
    directory, tokenizer = tmp_path_factory.mktemp("spaced"), sentencepiece()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    engine = make_tiny_engine(tokenizer=str(directory))
    server = RunningServer(lambda: engine)
    with server.client() as client:
        yield tokenizer, client
    server.stop()


@pytest.mark.parametrize("begin", [[], ["<s>"], ["<0xC3>", "<0xA9>"]], ids=["r", "bos", "two bytes"])
def test_dtk_1_sentencepiece_output_keeps_its_first_space_and_whole_characters(spaced, begin):
    """The prompt shares no id with the output: the penalty that forces it counts both."""
    tokenizer, client = spaced
    prompt = [tokenizer.token_to_id(piece) for piece in (*begin, "r")]
    output = [tokenizer.token_to_id(piece) for piece in "▁the"]
    output += [SENTENCEPIECE_BYTE_BASE + byte for byte in "世😀".encode()]
    body = {"prompt": prompt} | forcing(output)
    whole = client.post(URL, json=body).json()
    assert whole["choices"][0]["token_ids"] == output
    events = events_of(client.post(URL, json=body | {"stream": True}).text)
    expected = tokenizer.decode(prompt + output).removeprefix(tokenizer.decode(prompt))
    assert expected == " the世😀"
    assert choice_texts(events)[0] == whole["choices"][0]["text"] == expected
    assert not any("\ufffd" in choice["text"] for event in events[:-1] for choice in event["choices"])
