"""Outputs that a grammar binds: what they hold, where they end, and that nobody else notices."""

import json
import re

import jsonschema
import pytest

from jaxserve import SamplingParams, StructuredOutputs
from jaxserve.core import Submission, Terms
from jaxserve.engine import grammar_state
from jaxserve.runtime import COMPILES
from jaxserve.testing.tiny import EOS_ID, IM_END_ID
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.engine.schemas import random_schema

NUM_SCHEMAS = 200
ROOM = dict(max_model_len=256, max_num_seqs=8, num_pages=130)
SCARCE = dict(max_model_len=256, max_num_seqs=8, page_size=4, num_pages=66)


def bound(temperature=0.0, max_tokens=60, n=1, seed=None, **fields):
    """Settings under a constraint; fields of neither kind are `SamplingParams`'."""
    names = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "whitespace_pattern")
    wanted = StructuredOutputs(**{name: fields.pop(name) for name in names if name in fields})
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, n=n, seed=seed, structured_outputs=wanted, **fields
    )


def run(llm, params, prompt=(1, 2, 3)):
    """The choices of one request."""
    return llm.generate([list(prompt)], params, use_tqdm=False)[0].outputs


def schema_params(temperature):
    blanks = ({"disable_any_whitespace": True}, {"whitespace_pattern": "[ \\n]"})  # more would fill the context
    return [
        bound(json=random_schema(i), temperature=temperature, seed=i, max_tokens=240, **blanks[i % 4 == 0])
        for i in range(NUM_SCHEMAS)
    ]


def assert_valid(outputs):
    for index, output in enumerate(outputs):
        (choice,) = output.outputs
        assert choice.finish_reason == "stop", (index, choice.text, random_schema(index))
        validator = jsonschema.Draft202012Validator(
            random_schema(index), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(choice.text))


@pytest.fixture(scope="module")
def schema_prompts():
    return random_prompts([3 + i % 9 for i in range(NUM_SCHEMAS)], seed=5)


@pytest.fixture(scope="module")
def uninterrupted(make_llm, schema_prompts):
    """Outputs for every schema, seeded, nothing preempted."""
    return make_llm(**ROOM).generate(schema_prompts, schema_params(0.8), use_tqdm=False)


def test_documents_of_200_schemas_are_valid_and_nothing_compiles(make_llm, schema_prompts, uninterrupted):
    assert_valid(uninterrupted)
    llm = make_llm(**ROOM)
    compiles = COMPILES.count
    greedy_outputs = llm.generate(schema_prompts, schema_params(0.0), use_tqdm=False)
    assert_valid(greedy_outputs)
    assert COMPILES.count == compiles
    assert len({output.outputs[0].text for output in uninterrupted}) > NUM_SCHEMAS // 2, "most documents are alike"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_documents_of_200_schemas_are_the_same_when_preempted(make_llm, schema_prompts, uninterrupted, preemption):
    llm = make_llm(**SCARCE, reservation="optimistic", preemption=preemption)
    counters = llm.engine.scheduler.counters
    before, compiles = counters.preemptions, COMPILES.count
    outputs = llm.generate(schema_prompts, schema_params(0.8), use_tqdm=False)
    assert counters.preemptions > before + 10, "hardly anything was preempted: the test shows little"
    assert_valid(outputs)
    assert ids(outputs) == ids(uninterrupted)
    assert COMPILES.count == compiles
    assert_idle_clean(llm)


def test_a_paused_request_goes_on_where_its_grammar_was(make_llm):
    llm = make_llm(max_num_seqs=2, priority_preemption=True, preemption="pause", policy="priority")
    slow = bound(regex="[a-z]{40}", max_tokens=50)
    alone = run(llm, slow)[0].token_ids
    taken, engine = {"low": [], "high": []}, llm.engine

    def add(name, params, priority):
        submission = Submission([1, 2, 3], params, name, Terms(priority=priority))
        for request in engine.make_requests(submission, 0.0):
            engine.add(request, 0, lambda delta: taken[name.rstrip("12")].extend(delta.token_ids))

    before = engine.scheduler.counters.preemptions
    add("low", slow, 5)
    for _ in range(6):
        engine.step()
    add("high1", greedy(8), -5)
    add("high2", greedy(8), -5)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.counters.preemptions > before
    assert taken["low"] == alone and len(taken["high"]) == 16


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_each_kind_of_constraint_holds_for_every_choice(llm, temperature):
    settings = dict(temperature=temperature, n=4, seed=7)
    for choice in run(llm, bound(regex="[a-f]{3,6}(x|yz)", **settings)):
        assert re.fullmatch("[a-f]{3,6}(x|yz)", choice.text) and choice.finish_reason == "stop"
    colours = ["red", "green", "blue", "größer"]
    for choice in run(llm, bound(choice=colours, **settings)):
        assert choice.text in colours and choice.finish_reason == "stop"
    for choice in run(llm, bound(grammar='start: "(" start? ")" | NUMBER\nNUMBER: /[0-9]{1,2}/', **settings)):
        assert choice.text.count("(") == choice.text.count(")") or choice.finish_reason == "length"
        assert re.fullmatch(r"\(*[0-9]{0,2}\)*", choice.text)
    for choice in run(llm, bound(grammar='root ::= "a" b{2,3}\nb ::= [bc]', **settings)):
        assert re.fullmatch("a[bc]{2,3}", choice.text)
    for choice in run(llm, bound(json_object=True, max_tokens=40, **settings)):
        assert choice.text.startswith("{") and len(choice.token_ids) <= 40
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)
        else:
            assert choice.finish_reason == "length"


def test_seeds_repeat_and_choices_differ(llm):
    params = bound(regex="[a-z]{12}", temperature=2.0, n=6, seed=11)
    first, again = run(llm, params), run(llm, params)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.text for c in first}) > 1


def test_neighbours_of_a_grammar_get_what_they_get_alone(llm):
    prompts = random_prompts((5, 20, 9, 33, 12, 7), seed=2)
    free = [greedy(20), SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)] * 3
    alone = [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, free, strict=True)]
    mixed = [
        bound(regex="[a-z]{15}", temperature=0.7, seed=i) if i % 3 == 2 else settings for i, settings in enumerate(free)
    ]
    bound_alone = [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, mixed, strict=True)]
    together = ids(llm.generate(prompts, mixed, use_tqdm=False))
    assert together == bound_alone
    assert [t for i, t in enumerate(together) if i % 3 != 2] == [t for i, t in enumerate(alone) if i % 3 != 2]


def test_a_grammar_that_allows_what_the_model_wants_changes_nothing(llm):
    plain = run(llm, greedy(12))[0]
    text = bytes(i for i in plain.token_ids).decode("latin-1")
    if not text.isascii():
        pytest.skip("the tiny model's text is no text")
    assert run(llm, bound(choice=[text, text + "!"], max_tokens=12))[0].token_ids == plain.token_ids


def test_log_probabilities_are_the_models_own(llm):
    (choice,) = run(llm, bound(regex="~{3}", logprobs=2))
    entry = choice.logprobs[0]
    chosen = entry[choice.token_ids[0]]
    assert choice.text == "~~~" and len(choice.logprobs) == 3
    assert chosen.logprob < 0 and chosen.rank > 1, "the mask shows in the log-probabilities"
    assert max(other.logprob for other in entry.values()) > chosen.logprob


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        (dict(regex="ab?", min_tokens=5), "ab", 2),  # the grammar's end comes first
        (dict(regex="", min_tokens=3), "", 0),
        (dict(regex="", ignore_eos=True), "", 0),
        (dict(regex="x{2,4}", ignore_eos=True), "xxxx", 4),  # as long as it can be
        (dict(regex="x{1,4}", min_tokens=4), "xxxx", 4),
        (dict(regex="abc"), "abc", 3),  # no step for EOS where nothing else may follow
        (dict(regex="abc", stop=["b"]), "a", 2),
        (dict(regex="abc", stop=["b"], include_stop_str_in_output=True), "ab", 2),
        (dict(regex="abc", max_tokens=3), "abc", 3),
        (dict(regex="[ab]{2}c", stop_token_ids=[97, 98], min_tokens=2), None, 3),
    ],
    ids=str,
)
def test_where_an_output_ends(llm, fields, text, num_tokens):
    (choice,) = run(llm, bound(**fields))
    assert choice.finish_reason == "stop" and len(choice.token_ids) == num_tokens
    if text is not None:
        assert choice.text == text
    assert not {EOS_ID, IM_END_ID} & set(choice.token_ids)


def test_eos_ends_an_output_where_the_grammar_may_go_on(llm):
    # Nothing but EOS is left of what the grammar allows.
    (choice,) = run(llm, bound(regex="a+", allowed_token_ids=(97, EOS_ID), logit_bias={97: -100.0}))
    assert choice.token_ids[-1] == EOS_ID and choice.finish_reason == "stop"
    (choice,) = run(llm, bound(regex="a+", logit_bias={EOS_ID: 100.0}, min_tokens=5))
    assert choice.token_ids == [97] * 5 + [EOS_ID] and choice.text == "aaaaa"


def test_an_output_that_is_cut_says_so(llm):
    (choice,) = run(llm, bound(regex="[a-z]{30}", max_tokens=10))
    assert choice.finish_reason == "length" and re.fullmatch("[a-z]{10}", choice.text)
    (choice,) = run(llm, bound(regex="a", max_tokens=0))
    assert choice.finish_reason == "length" and not choice.token_ids


def test_other_settings_choose_among_what_the_grammar_allows(llm):
    barred = dict(allowed_token_ids=(*b"abz", EOS_ID), bad_words=["b"], logit_bias={99: 100.0})
    penalties = dict(repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0)
    for more in (dict(top_k=2), dict(top_p=0.1), dict(min_p=0.9), dict(top_k=100, top_p=0.99), penalties):
        for choice in run(llm, bound(regex="[abc]{6}", temperature=1.0, n=3, seed=1, **barred, **more)):
            assert choice.text == "aaaaaa" and choice.finish_reason == "stop"


def test_settings_that_leave_nothing_end_their_request_alone(llm):
    params = [bound(regex="ab[ab]+", allowed_token_ids=(97, 99)), greedy(10), bound(regex="[ab]{3}")]
    alone = [ids(llm.generate([[5, 6]], p, use_tqdm=False))[0] for p in params[1:]]
    outputs = llm.generate([[5, 6]] * 3, params, use_tqdm=False)
    failed = outputs[0].outputs[0]
    assert failed.finish_reason == "unfollowable" and failed.token_ids == [97]
    nothing = "allowed_token_ids leaves no token of those that structured_outputs allows after"
    assert failed.error == f"{nothing} 1 output tokens"
    assert ids(outputs[1:]) == alone
    assert_idle_clean(llm)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(allowed_token_ids=(99,)), "allowed_token_ids leaves"),
        (dict(bad_words=["a", "b"]), "bad_words leaves"),
        (dict(allowed_token_ids=(97, 99), bad_words=["a"]), "bad_words and allowed_token_ids leave"),
        (dict(allowed_token_ids=(EOS_ID,), min_tokens=1), "allowed_token_ids leaves"),
    ],
    ids=str,
)
def test_settings_that_leave_nothing_to_begin_with_are_refused_at_once(llm, fields, names):
    message = f"{names} no token of those that structured_outputs allows after 0 output tokens"
    with pytest.raises(ValueError, match=message):
        run(llm, bound(regex="[ab]+", **fields))
    assert_idle_clean(llm)


def test_an_output_may_end_where_nothing_else_is_left(llm):
    for fields in (dict(regex="[ab]*"), dict(regex="a?b?")):
        (choice,) = run(llm, bound(**fields, allowed_token_ids=(99,)))
        assert (choice.finish_reason, choice.token_ids) == ("stop", [])
    # min_tokens holds off only what is not all that is left.
    (choice,) = run(llm, bound(regex="[ab]{2}", allowed_token_ids=(97,), stop_token_ids=(97,), min_tokens=2))
    assert choice.token_ids == [97, 97] and choice.finish_reason == "stop"


def test_a_grammar_that_grows_too_costly_ends_its_request_alone(llm):
    costly = 'start: s\ns: "a" | ' + " | ".join(" ".join("s" * count) for count in range(2, 20))
    params = [bound(grammar=costly, max_tokens=60, ignore_eos=True), greedy(10)]
    alone = ids(llm.generate([[5, 6]], params[1], use_tqdm=False))[0]
    outputs = llm.generate([[5, 6]] * 2, params, use_tqdm=False)
    failed = outputs[0].outputs[0]
    assert failed.finish_reason == "unfollowable" and 5 < len(failed.token_ids) < 60
    assert "structured_outputs could not be followed: " in failed.error and "items; max is 2000" in failed.error
    assert ids(outputs[1:]) == [alone]
    assert_idle_clean(llm)


def test_a_matcher_that_fails_midway_ends_its_request_alone(llm, monkeypatch):
    params = [bound(regex="[a-z]{20}"), bound(regex="[A-Z]{20}"), greedy(20)]
    alone = [ids(llm.generate([[5, 6]], p, use_tqdm=False))[0] for p in params]
    real, calls = grammar_state.matcher_fault, []

    def sometimes(matcher):
        calls.append(matcher)
        return "too complex" if len(calls) == 9 else real(matcher)

    monkeypatch.setattr(grammar_state, "matcher_fault", sometimes)
    outputs = llm.generate([[5, 6]] * 3, params, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert sorted(reasons[:2]) == ["stop", "unfollowable"] and reasons[2] == "length"
    failed = reasons.index("unfollowable")
    assert "too complex" in outputs[failed].outputs[0].error
    assert outputs[failed].outputs[0].token_ids == alone[failed][:4]
    assert [ids(outputs)[i] for i in range(3) if i != failed] == [alone[i] for i in range(3) if i != failed]
    assert_idle_clean(llm)


class Panic(BaseException):
    """As a library written in Rust raises."""


@pytest.mark.parametrize("method", ["fill_masks", "accept"])
@pytest.mark.parametrize("fault", [RuntimeError, Panic])
def test_faults_of_the_grammar_library_end_the_bound_requests_alone(llm, monkeypatch, method, fault):
    free = ids(llm.generate([[5, 6]], greedy(20), use_tqdm=False))[0]
    compiler = llm.engine._grammars.compiler

    def broken(*_):
        raise fault("broken")

    monkeypatch.setattr(compiler, method, broken)
    outputs = llm.generate([[5, 6]] * 2, [bound(regex="[a-z]{20}"), greedy(20)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and "internal error" in outputs[0].outputs[0].error
    assert ids(outputs)[1] == free
    assert_idle_clean(llm)


def test_what_cannot_be_followed_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match=r"structured_outputs\.regex cannot be followed"):
        run(llm, bound(regex="("))
    assert_idle_clean(llm)


def test_without_a_tokenizer_there_are_no_grammars(make_llm):
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        run(make_llm(skip_tokenizer_init=True), bound(regex="a"))


@pytest.mark.slow
@pytest.mark.parametrize("scarce", [False, True])
def test_the_demo_models_documents_of_200_schemas_are_valid(scarce):
    from jaxserve import LLM

    pages = {"num_pages": 44, "page_size": 8, "reservation": "optimistic", "preemption": "recompute"} if scarce else {}
    llm = LLM(
        "smollm2-135m",
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        decode_buckets=(16,),
        prefill_buckets=(64,),
        table_width_buckets=(32,) if scarce else (16,),
        **pages,
    )
    compiles = COMPILES.count
    prompts = [f"Number {i}, as JSON: " for i in range(NUM_SCHEMAS)]
    params = [
        bound(json=random_schema(i), temperature=0.7, seed=i, max_tokens=200, whitespace_pattern="[ \\n]{1,2}")
        for i in range(NUM_SCHEMAS)
    ]
    assert_valid(llm.generate(prompts, params, use_tqdm=False))
    assert COMPILES.count == compiles
    if scarce:
        assert llm.engine.scheduler.counters.preemptions > 10
