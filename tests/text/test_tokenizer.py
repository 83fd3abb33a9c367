"""Tokenizers from Hugging Face directories: ids, special tokens, end ids, bad input."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.testing.tiny import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, write_tiny_model
from jaxserve.text import Tokenizer, load_tokenizer
from tests.text.vocabularies import sentencepiece, trained_bpe


def load(directory, override=None):
    return load_tokenizer(SimpleNamespace(kind="hf", path=directory), override)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return load(tiny_model_dir)


def test_special_tokens_written_in_text_are_recognised(tokenizer):
    assert tokenizer.encode("é<|im_end|>x") == [0xC3, 0xA9, IM_END_ID, ord("x")]


def test_decode_hides_special_tokens_unless_asked(tokenizer):
    ids = [*b"a", IM_END_ID, *b"b"]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_end_ids_come_from_the_generation_config_then_the_tokenizer(tokenizer):
    assert tokenizer.eos_ids == (EOS_ID, IM_END_ID)


def test_chat_ids_are_the_templates(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [IM_START_ID, *b"user\nhi", IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]


def test_bos_is_added_once_where_the_tokenizer_adds_it(tmp_path):
    tokenizer = load(write_tiny_model(tmp_path / "m", add_bos=True))
    assert tokenizer.adds_bos
    assert tokenizer.encode("ab") == [BOS_ID, *b"ab"]
    assert tokenizer.encode("ab", add_special_tokens=False) == [*b"ab"]
    assert tokenizer.encode_chat([{"role": "user", "content": ""}])[:2] == [BOS_ID, IM_START_ID]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_configs_add_bos_token_wins_over_the_pipeline(tmp_path, wanted):
    directory = write_tiny_model(tmp_path / "m", add_bos=not wanted)
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"add_bos_token": wanted}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(directory).encode("a") == ([BOS_ID] if wanted else []) + [*b"a"]


def test_a_template_file_wins_over_the_config(tmp_path):
    directory = write_tiny_model(tmp_path / "m")
    (directory / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    assert load(directory).render_chat([{"role": "user", "content": "x"}]) == "<x>"


def test_the_tool_template_is_used_for_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(write_tiny_model(tmp_path / "m", chat_template=named))
    assert tokenizer.render_chat([], tools=[{"name": "f"}]) == "tools"
    assert tokenizer.render_chat([]) == "plain"


def test_an_override_replaces_the_models_tokenizer(tmp_path, tiny_model_dir):
    other = write_tiny_model(tmp_path / "m", vocab=300)
    assert load(tiny_model_dir, str(other)).vocab_size == 300
    assert load(tiny_model_dir, str(other / "tokenizer.json")).vocab_size == 300
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tiny_model_dir, str(tmp_path / "nowhere"))


def test_padding_and_truncation_of_training_are_off(tmp_path, tiny_model_dir):
    directory = write_tiny_model(tmp_path / "m")
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_padding(length=8)
    backend.enable_truncation(4)
    backend.save(str(directory / "tokenizer.json"))
    assert load(directory).encode("abcdefghij") == [*b"abcdefghij"]
    assert load(directory).encode("a") == [*b"a"]


def test_long_and_short_texts_encode_alike():
    tokenizer = Tokenizer(trained_bpe())
    text = "The quick brown fox " * 200
    assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("length", [3, 5000])
def test_a_lone_surrogate_is_refused_naming_its_place(tokenizer, length):
    with pytest.raises(ValueError, match=rf"lone surrogate U\+D83D at character {length}"):
        tokenizer.encode("a" * length + "\ud83d")


def test_text_that_is_no_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="must be a string"):
        tokenizer.encode(["a"])


def test_a_negative_id_is_refused_and_a_padding_id_has_no_text(tokenizer):
    with pytest.raises(ValueError, match="negative"):
        tokenizer.decode([-1])
    assert tokenizer.decode([65, 10**6]) == "A"
    assert tokenizer.token_text(0xC3) == "\ufffd" and tokenizer.token_text(IM_END_ID) == "<|im_end|>"


def test_sentencepiece_decoding_agrees_with_the_tokenizers_library():
    backend = sentencepiece()
    tokenizer = Tokenizer(backend, bos_id=1)
    for text in ("the tree", " the", "世 the", "", "t  h"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text


def test_an_unknown_decoder_is_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="decoder is \\['WordPiece'\\]"):
        Tokenizer(backend)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a readable tokenizer"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("generation_config.json", "{", "not valid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    directory = write_tiny_model(tmp_path / "m")
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_a_sentencepiece_file_alone_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match="set tokenizer"):
        load(tmp_path)


def test_text_needs_no_jax():
    script = "import sys, jaxserve.text, jaxserve.text.gguf_tokenizer; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_template_of_the_operators_replaces_all_of_the_models(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    model = SimpleNamespace(kind="hf", path=write_tiny_model(tmp_path / "m", chat_template=named))
    file = tmp_path / "own.jinja"
    file.write_text("<{{ messages[0].content }}>")
    tokenizer = load_tokenizer(model, chat_template=str(file))
    assert tokenizer.render_chat([{"content": "x"}]) == tokenizer.render_chat([{"content": "x"}], tools=[{}]) == "<x>"
    assert tokenizer.chat_template == "<{{ messages[0].content }}>"
    with pytest.raises(CheckpointError, match="nowhere' does not exist"):
        load_tokenizer(model, chat_template=str(tmp_path / "nowhere"))
    file.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        load_tokenizer(model, chat_template=str(file))
