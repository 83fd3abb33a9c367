"""Tokenizers rebuilt from GGUF metadata give the ids of their originals."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import resolve_model
from jaxserve.testing.tiny import tiny_config, tiny_weights
from jaxserve.text import load_tokenizer
from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf, tokenizer_from_metadata
from jaxserve.text.gguf_vocabulary import gguf_vocabulary
from jaxserve.text.tokenizer import Tokenizer
from tests.loading.gguf_files import write_gguf
from tests.text.vocabularies import CORPUS, SPECIAL, sentencepiece_tokens, trained_bpe

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = ["Café — 123 😊", *CORPUS[:4], "", " ", "a\n\n b", "<|im_start|>user\nhi<|im_end|>", "\u200d e\u0301"]


def write(path, edit):
    config = tiny_config()
    return write_gguf(path, config, tiny_weights(config), edit=edit)


def bpe_metadata(backend, pre, **settings):
    """An `edit` for the writer that stores a trained BPE as llama.cpp does."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens = settings.get("tokens", tokens)
    merges = settings.get("merges", [" ".join(pair) for pair in model["merges"]])

    def edit(writer):
        writer.add_tokenizer_model(settings.get("model", "gpt2"))
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")

    return edit


@pytest.fixture(scope="module")
def smollm_like(tmp_path_factory):
    backend = trained_bpe()
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", bpe_metadata(backend, "smollm"))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return backend, tokenizer_from_gguf(path)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_original(smollm_like, text):
    original, rebuilt = smollm_like
    ids = rebuilt.encode(text)
    assert ids == original.encode(text).ids
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_template_come_along(smollm_like):
    _, tokenizer = smollm_like
    assert tokenizer.bos_id == 1 and not tokenizer.adds_bos
    assert tokenizer.special_ids == {0, 1, 2}
    # The end-of-turn token ends a generation though the file names only the end of text.
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.render_chat([{"content": "hi"}]) == "<|im_start|>hi"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay 12345", ["I", "'ll", " pay", " 12345"]),
        ("smollm", "I'll pay 12345", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", " pay", " ", "123", "45", "\n\n", " x"]),
        ("dbrx", "I'LL pay 12345", ["I", "'LL", " pay", " ", "123", "45"]),
        ("glm4", "I'LL pay 12345", ["I", "'LL", " pay", " ", "123", "45"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("tekken", "aB I'll 12/\n", ["a", "B", " I", "'ll", " ", "1", "2", "/\n"]),
        ("gpt-4o", "aB I'll 1234", ["a", "B", " I'll", " ", "123", "4"]),
        (
            "deepseek-v3",
            "I'll pay 12345 日本x!ab +=\n\n",
            ["I", "'ll", " pay", " ", "123", "45", " ", "日本", "x", "!ab", " +=\n\n"],
        ),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path, pre, text, pieces):
    backend = tokenizer_from_gguf(write(tmp_path / "m.gguf", bpe_metadata(trained_bpe(), pre)))._backend
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


def test_a_deepseek_tokenizer_is_written_under_its_own_name():
    first, second = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
    third = (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in (first, second, third)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [*TEXTS, *CORPUS, "x = a.b(c) + 12345;", "日本語のテキスト x!ab हिन्दी camelCaseWORD"] * 10
    trainer = trainers.BpeTrainer(vocab_size=900, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    original = Tokenizer(backend, bos_id=None, eos_ids=[], adds_bos=False, chat_templates={}, special_tokens={})
    metadata = gguf_vocabulary(original, "model", backend.get_vocab_size())
    assert metadata["tokenizer.ggml.pre"] == "deepseek-v3"
    rebuilt = tokenizer_from_metadata(Path("m.gguf"), metadata)
    for text in texts:
        assert rebuilt.encode(text) == original.encode(text)


def test_bos_is_added_where_llama3_files_leave_it_unsaid(tmp_path):
    tokenizer = tokenizer_from_gguf(write(tmp_path / "m.gguf", bpe_metadata(trained_bpe(), "llama-bpe")))
    assert tokenizer.adds_bos and tokenizer.encode("a")[0] == 1
    assert tokenizer.encode_chat([{"content": "a"}]) == tokenizer.encode("a")


def sentencepiece_metadata(**settings):
    tokens, scores, types = sentencepiece_tokens()

    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(settings.get("scores", scores))
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "prefix" in settings:
            writer.add_add_space_prefix(settings["prefix"])

    return edit


def test_sentencepiece_merges_the_best_scored_pair_first(tmp_path):
    tokenizer = tokenizer_from_gguf(write(tmp_path / "m.gguf", sentencepiece_metadata()))
    pieces = [tokenizer._backend.id_to_token(token) for token in tokenizer.encode("the there é")]
    assert pieces == ["<s>", "▁the", "▁the", "re", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the there é")) == "the there é"


def test_sentencepiece_without_space_prefix_keeps_text_as_it_is(tmp_path):
    tokenizer = tokenizer_from_gguf(write(tmp_path / "m.gguf", sentencepiece_metadata(prefix=False)))
    assert [tokenizer._backend.id_to_token(token) for token in tokenizer.encode("the")] == ["<s>", "the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (bpe_metadata(trained_bpe(), "strange"), UnsupportedModelError, "pre-tokenizer 'strange' is not supported"),
        (bpe_metadata(trained_bpe(), "smollm", model="t5"), UnsupportedModelError, "tokenizer 't5' is not supported"),
        (bpe_metadata(trained_bpe(), "smollm", merges=["a nosuch"]), CheckpointError, "merge 'a nosuch' names a token"),
        (bpe_metadata(trained_bpe(), "smollm", tokens=["a", "b", "a"]), CheckpointError, "names a token twice"),
        (bpe_metadata(trained_bpe(), "smollm", tokens=["a"], merges=["a a"]), CheckpointError, "names a token"),
        (sentencepiece_metadata(scores=[0.5]), CheckpointError, "one number per token"),
        (lambda writer: writer.add_tokenizer_model("gpt2"), CheckpointError, "no usable vocabulary"),
    ],
)
def test_unusable_metadata_is_refused(tmp_path, edit, error, message):
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(write(tmp_path / "m.gguf", edit))


def test_an_override_replaces_the_files_tokenizer(tmp_path, tiny_model_dir):
    path = write(tmp_path / "m.gguf", bpe_metadata(trained_bpe(), "strange"))
    resolved = SimpleNamespace(kind="gguf", path=path)
    assert load_tokenizer(resolved, str(tiny_model_dir)).encode("a") == [97]


def test_smollm2_gives_the_reference_ids_and_texts():
    cases = json.loads((GOLDEN / "smollm2_golden.json").read_text())["cases"]
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    assert tokenizer.eos_ids == (2,) and not tokenizer.adds_bos
    for case in cases:
        ids = tokenizer.encode_chat(case["messages"]) if "messages" in case else tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["greedy_ids"]) == case["greedy_text"], case["name"]
