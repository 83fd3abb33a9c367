"""Incremental detokenising equals whole decoding, never shows half a character, and costs the same per token."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.text import IncrementalDetokenizer, Tokenizer
from tests.text.vocabularies import SENTENCEPIECE_BYTE_BASE, byte_tokenizer, sentencepiece, trained_bpe

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def spaced_tokenizer():
    return Tokenizer(sentencepiece(), bos_id=1, eos_ids=[2])


def deltas(tokenizer, prompt, output, **settings):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **settings)
    return [*(detokenizer.add(token) for token in output), detokenizer.flush()]


def without(prompt_text, whole):
    """`whole` with the part that repeats `prompt_text` taken away."""
    common = 0
    while common < min(len(prompt_text), len(whole)) and prompt_text[common] == whole[common]:
        common += 1
    return whole[common:]


def test_characters_split_over_tokens_come_whole(bytes_tokenizer):
    text = "ď世😀"
    pieces = deltas(bytes_tokenizer, [65], list(text.encode()))
    assert pieces == ["", "ď", "", "", "世", "", "", "", "😀", ""]


def test_an_unfinished_character_is_held_until_flush(bytes_tokenizer):
    assert deltas(bytes_tokenizer, [], [0xF0, 0x9F]) == ["", "", REPLACEMENT]


def test_bytes_that_are_no_text_become_replacement_characters_at_once(bytes_tokenizer):
    assert deltas(bytes_tokenizer, [], [0xFF, 65, 0xE4, 66]) == [REPLACEMENT, "A", "", REPLACEMENT + "B", ""]


def test_a_character_begun_by_the_prompt_is_completed_by_the_output(bytes_tokenizer):
    first, *rest = "😀".encode()
    assert deltas(bytes_tokenizer, [65, first], [*rest, 66]) == ["", "", "😀", "B", ""]


def test_a_broken_character_of_the_prompt_is_not_repeated(bytes_tokenizer):
    assert deltas(bytes_tokenizer, [65, 0xF0, 0x9F], [66, 67]) == ["B", "C", ""]


def test_special_tokens_give_text_only_when_asked(bytes_tokenizer):
    assert deltas(bytes_tokenizer, [65], [66, 257, 67]) == ["B", "", "C", ""]
    assert "".join(deltas(bytes_tokenizer, [65], [66, 257], skip_special_tokens=False)) == "B<|eos|>"


def test_ids_of_padding_rows_give_no_text(bytes_tokenizer):
    assert deltas(bytes_tokenizer, [65], [66, 5000, 67]) == ["B", "", "C", ""]


def test_sentencepiece_output_after_a_prompt_keeps_its_first_space(spaced_tokenizer):
    the = spaced_tokenizer.token_id("▁the")
    assert deltas(spaced_tokenizer, [the], [the, the]) == [" the", " the", ""]


def test_sentencepiece_output_that_begins_the_text_has_no_first_space(spaced_tokenizer):
    the = spaced_tokenizer.token_id("▁the")
    assert deltas(spaced_tokenizer, [], [the, the]) == ["the", " the", ""]
    assert deltas(spaced_tokenizer, [1], [the, the]) == ["the", " the", ""]


def test_sentencepiece_byte_tokens_make_one_character(spaced_tokenizer):
    output = [SENTENCEPIECE_BYTE_BASE + byte for byte in "世".encode()]
    assert deltas(spaced_tokenizer, [1], output) == ["", "", "世", ""]


@given(
    prompt=st.lists(st.integers(0, 263), max_size=12),
    output=st.lists(st.integers(0, 263), max_size=40),
    skip=st.booleans(),
)
@example(prompt=[0xEF, 0xBF], output=[0xBD, 65], skip=True)
@example(prompt=[0xF0, 0x9F], output=[], skip=True)
@example(prompt=[0xF0, 0x9F, 256, 0x98], output=[0x80], skip=True)
def test_joined_deltas_are_the_whole_text_without_the_prompt(bytes_tokenizer, prompt, output, skip):
    pieces = deltas(bytes_tokenizer, prompt, output, skip_special_tokens=skip)
    whole = bytes_tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert "".join(pieces) == without(bytes_tokenizer.decode(prompt, skip_special_tokens=skip), whole)


@given(
    text=st.text(max_size=40),
    cut=st.integers(0, 40),
)
def test_text_streamed_through_a_trained_vocabulary_comes_back(text, cut):
    tokenizer = trained()
    ids = tokenizer.encode(text)
    pieces = deltas(tokenizer, ids[:cut], ids[cut:])
    assert "".join(pieces) == without(tokenizer.decode(ids[:cut]), text)
    assert not any(REPLACEMENT in piece for piece in pieces) or REPLACEMENT in text


_trained = []


def trained():
    if not _trained:
        _trained.append(Tokenizer(trained_bpe()))
    return _trained[0]


@given(ids=st.lists(st.integers(0, 255), max_size=30))
def test_decoding_agrees_with_the_tokenizers_library(bytes_tokenizer, ids):
    assert bytes_tokenizer.decode(ids) == bytes_tokenizer._backend.decode(ids)


def test_cost_per_token_does_not_grow_with_history(bytes_tokenizer):
    """Invalid bytes are the worst case: a window that waits for valid text would grow without end."""
    detokenizer = IncrementalDetokenizer(bytes_tokenizer, list(range(200)) * 500)

    def seconds(count):
        start = time.perf_counter()
        for _ in range(count):
            detokenizer.add(0x80)
        return time.perf_counter() - start

    early = min(seconds(2000) for _ in range(3))
    seconds(50_000)
    late = min(seconds(2000) for _ in range(3))
    assert late < 10 * early


def test_shown_special_tokens_are_text_and_the_others_are_not(bytes_tokenizer):
    first, second = sorted(bytes_tokenizer.special_ids)[:2]
    output = [65, first, second, 66]
    assert "".join(deltas(bytes_tokenizer, [], output)) == "AB"
    shown = "".join(deltas(bytes_tokenizer, [], output, shown_special_ids={first}))
    assert shown == "A" + bytes_tokenizer.token_text(first) + "B"
