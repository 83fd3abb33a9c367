"""The grammar compiler on the tiny byte vocabulary: id = byte, then special tokens."""

import threading
import time

import numpy as np
import pytest

from jaxserve import StructuredOutputs
from jaxserve.loading import resolve_model
from jaxserve.testing.tiny import EOS_ID, IM_END_ID, IM_START_ID
from jaxserve.text import GrammarCompiler, grammar, is_internal, load_tokenizer, matcher_fault

VOCAB = 300  # 36 rows more than the tokenizer knows
ENDS = {EOS_ID, IM_END_ID}


@pytest.fixture(scope="module")
def compiler(tiny_model_dir):
    tokenizer = load_tokenizer(resolve_model(str(tiny_model_dir)))
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS_ID, IM_END_ID))


def allowed(compiler, matcher):
    masks = np.zeros((3, compiler.mask_words), np.uint32)
    compiler.fill_masks([(matcher, 1)], masks)
    assert not masks[[0, 2]].any(), "another row was written"
    return set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist())


def matches(compiler, text, **fields):
    """Whether a text is one that the constraint allows, from its beginning to an end."""
    matcher = compiler.compile(StructuredOutputs(**fields)).start()
    for byte in text.encode():
        if byte not in allowed(compiler, matcher):
            return False
        compiler.accept([(matcher, byte)])
    assert matcher_fault(matcher) is None
    return allowed(compiler, matcher) >= ENDS


def test_masks_follow_a_regex_to_its_end(compiler):
    matcher = compiler.compile(StructuredOutputs(regex="ab?")).start()
    assert allowed(compiler, matcher) == {ord("a")}
    compiler.accept([(matcher, ord("a"))])
    assert allowed(compiler, matcher) == {ord("b")} | ENDS and not matcher.is_stopped()
    compiler.accept([(matcher, ord("b"))])
    assert allowed(compiler, matcher) == ENDS and matcher.is_stopped()


def test_matchers_of_one_grammar_are_apart(compiler):
    grammar = compiler.compile(StructuredOutputs(choice=["ab", "cd"]))
    first, second = grammar.start(), grammar.start()
    compiler.accept([(first, ord("a"))])
    assert allowed(compiler, first) == {ord("b")} and allowed(compiler, second) == {ord("a"), ord("c")}


def test_a_token_that_is_not_allowed_is_a_fault_of_its_matcher_alone(compiler):
    grammar = compiler.compile(StructuredOutputs(regex="ab"))
    wrong, right = grammar.start(), grammar.start()
    compiler.accept([(wrong, ord("x")), (right, ord("a"))])
    assert is_internal(matcher_fault(wrong)) and matcher_fault(right) is None


@pytest.mark.parametrize("text", ["😀", "a\nb", 'q"x', "b\\c", "\u2028", "é", "a/b", "{}[]()*+?", "%json", "#no"])
def test_choices_are_taken_literally(compiler, text):
    assert matches(compiler, text, choice=[text, "other"])
    assert not matches(compiler, text + "x", choice=[text, "other"])


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("12", {"regex": "^[0-9]+$"}, True),
        ("a\nb", {"regex": "a\nb"}, True),
        ("(())", {"grammar": 'start: "(" start? ")"'}, True),
        ("(()", {"grammar": 'start: "(" start? ")"'}, False),
        ("abb", {"grammar": 'root ::= "a" b+\nb ::= "b"'}, True),
        ('{"a":[1, null]}', {"json_object": True}, True),
        ("[1]", {"json_object": True}, False),
        ("[1]", {"json": "true"}, True),
        ('{"a":1}', {"json_object": True, "disable_any_whitespace": True}, True),
        ('{"a": 1}', {"json_object": True, "disable_any_whitespace": True}, False),
        ('{"a":' + 32 * " " + "1}", {"json_object": True}, True),
        ('{"a":' + 33 * " " + "1}", {"json_object": True}, False),
        ('{"a":  1}', {"json_object": True, "whitespace_pattern": "[ ]{1,2}"}, True),
        ('{"a":\n1}', {"json_object": True, "whitespace_pattern": "[ ]{1,2}"}, False),
        ('{ "a":1}', {"json": {"type": "object", "x-guidance": {"whitespace_flexible": False}}}, False),
    ],
)
def test_what_a_constraint_allows(compiler, text, fields, expected):
    assert matches(compiler, text, **fields) is expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "[a-z"}, "structured_outputs.regex cannot be followed: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: other"}, 'structured_outputs.grammar cannot be followed: .*unknown name: "other"'),
        ({"grammar": "hello"}, "structured_outputs.grammar is neither Lark"),
        ({"grammar": "root ::= " + 3000 * "(" + '"a"' + 3000 * ")"}, "nested too deeply"),
        ({"json": '{"type":'}, "structured_outputs.json is no JSON"),
        ({"json": "3"}, "must be a JSON schema, an object; got int"),
        ({"json": "false"}, "the schema false, which no document meets"),
        ({"json": {"type": "no such type"}}, "Invalid type: no such type"),
        ({"json": {"not": {}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum .3."),
        ({"json": {"$ref": "#"}}, "cannot be followed"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(compiler, fields, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        compiler.compile(StructuredOutputs(**fields))


def test_a_constraint_that_is_too_long_is_refused(compiler):
    with pytest.raises(ValueError, match=r"regex has 131073 bytes; the limit is 131072 \(max_grammar_bytes\)"):
        compiler.compile(StructuredOutputs(regex="a" * ((1 << 17) + 1)))


def test_a_grammar_that_would_overflow_the_stack_is_refused(compiler):
    rules = "\n".join(f'a{i}: a{i + 1} "y"' for i in range(5000))
    with pytest.raises(ValueError, match="too complex: its rules are nested too deeply"):
        compiler.compile(StructuredOutputs(grammar=f'start: a0\n{rules}\na5000: "x"'))


def test_a_grammar_that_takes_too_long_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "TRIAL_S", 0.5)
    with pytest.raises(ValueError, match=r"too complex: compiling it takes over 0\.5 s"):
        compiler.compile(StructuredOutputs(regex="a?b*" * 25000))


def test_a_large_grammar_that_is_well_is_taken(compiler):
    texts = [f"word{i}" for i in range(2000)]
    assert matches(compiler, "word1234", choice=texts) and not matches(compiler, "word9999", choice=texts)


def test_special_tokens_are_no_text_but_a_grammar_may_name_them(compiler):
    assert "<" in "<|im_start|>" and IM_START_ID not in allowed(
        compiler, compiler.compile(StructuredOutputs(regex="(.|\n)*")).start()
    )
    named = compiler.compile(StructuredOutputs(grammar='start: <|im_start|> "a"'))
    assert allowed(compiler, named.start()) == {IM_START_ID}


def test_ids_that_the_tokenizer_lacks_are_in_no_mask_of_a_text(compiler):
    everything = allowed(compiler, compiler.compile(StructuredOutputs(regex="(.|\n)*")).start())
    assert everything and max(everything) < 264


def test_a_model_without_eos_has_no_grammars(compiler):
    other = GrammarCompiler(compiler._tokenizer, vocab_size=VOCAB, eos_token_ids=())
    with pytest.raises(ValueError, match="structured_outputs is not available: the model has no EOS id"):
        other.compile(StructuredOutputs(regex="a"))


def test_a_vocabulary_that_is_read_otherwise_is_refused(compiler, monkeypatch):
    other = GrammarCompiler(compiler._tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS_ID,))
    monkeypatch.setattr(type(other._tokenizer), "token_bytes", lambda self, token_id: b"z")
    with pytest.raises(ValueError, match="not available: token 0 is b'z' for the detokenizer"):
        other.compile(StructuredOutputs(regex="a"))


def test_compiled_grammars_are_kept_up_to_a_number(compiler):
    wanted = StructuredOutputs(regex="kept")
    first = compiler.compile(wanted)
    assert compiler.compile(StructuredOutputs(regex="kept")) is first
    for index in range(grammar.NUM_KEPT):
        compiler.compile(StructuredOutputs(regex=f"x{index}"))
    assert compiler.compile(wanted) is not first and len(compiler._kept) == grammar.NUM_KEPT


def test_threads_that_compile_at_once_get_grammars_that_work(compiler):
    failed = []

    def work(index):
        try:
            assert matches(compiler, f"t{index}", choice=[f"t{index}", "u"])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed


def test_a_step_of_a_costly_grammar_is_bounded(compiler):
    began = time.perf_counter()
    try:
        matcher = compiler.compile(
            StructuredOutputs(grammar='start: a a a a a a\na: | "x" | a a | /x+/ | a a a')
        ).start()
    except ValueError as refused:
        assert "cannot be followed" in str(refused)
        return
    for _ in range(20):
        allowed(compiler, matcher)
        compiler.accept([(matcher, ord("x"))])
        if matcher_fault(matcher):
            break
    assert time.perf_counter() - began < 20
