"""`bad_words` of several tokens: a word's last token never follows its others, and nobody else notices."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams, StructuredOutputs
from jaxserve.engine.validation import bad_word_ids
from jaxserve.engine.word_tail import WordTail
from jaxserve.runtime import COMPILES
from jaxserve.testing.tiny import EOS_ID
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.engine.test_scheduling_neutrality import SCARCE
from tests.models.test_golden import dense_logits


def test_the_ids_that_would_complete_a_word():
    tail = WordTail([(1, 2), (1, 2, 3), (2, 1, 2, 4), (2, 2, 2), (9, 9)])
    seen = []
    for token_id in (1, 2, 1, 2, 2, 9, 1):
        tail.append(token_id)
        seen.append(sorted(tail.barred()))
    assert seen == [[2], [3], [2], [3, 4], [2], [9], [2]]
    assert WordTail([(1, 2)]).barred() == []


def test_any_tail_is_compared_as_a_whole():
    rng = random.Random(5)
    words = [tuple(rng.choices(range(3), k=rng.randint(2, 5))) for _ in range(20)]
    tail, output = WordTail(words), []
    for _ in range(500):
        text = "".join(map(str, output))
        assert set(tail.barred()) == {w[-1] for w in words if text.endswith("".join(map(str, w[:-1])))}
        token_id = rng.randrange(3)
        tail.append(token_id)
        output.append(token_id)


TABLE = {"ab": [1, 2], " ab": [3], "cd": [4], " cd": [5], "ef": [6, 7], " ef": [8, 7], "gh": [9, 9], " gh": [9, 8]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cd"], ((4,), (5,))),
        (["ab"], ((1, 2),)),  # after a space it is one token, as in vLLM left alone
        (["  ef"], ((6, 7), (8, 7))),
        (["gh"], ((9, 9),)),  # it begins alike, so the form after a space is not another word
        (["cd", "ef", "cd"], ((4,), (5,), (6, 7), (8, 7))),
    ],
)
def test_a_word_is_its_ids_alone_and_after_a_space(words, expected):
    assert bad_word_ids(words, TABLE.__getitem__) == expected


def test_a_word_without_tokens_is_refused():
    with pytest.raises(ValueError, match="bad_words has 'x', which the tokenizer gives no token"):
        bad_word_ids(["x"], lambda text: [])


def holds(output, words):
    """Whether one of the words stands in an output of the byte tokenizer."""
    return any(word.encode() in bytes(i % 256 for i in output) for word in words)


def without_words(llm, prompt, words, count):
    """The greedy output and its top-two gaps, by dense passes and the rule written out."""
    engine, output, gaps = llm.engine, [], []
    words = [list(word.encode()) for word in words]
    for _ in range(count):
        tokens = prompt + output
        padded = jnp.asarray(tokens + [0] * (48 - len(tokens)), jnp.int32)
        logits = np.array(dense_logits(engine.model_config, engine.runner._params, padded)[len(tokens) - 1])
        for word in words:
            if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf
        output.append(int(logits.argmax()))
        gaps.append(np.diff(np.sort(logits)[-2:])[0])
    return output, gaps


def pieces(output, *spans):
    """Words that stand in an output."""
    return [bytes(output[first:last]).decode() for first, last in spans]


@pytest.fixture(scope="module")
def plain(llm):
    """A prompt and its greedy output, which is text."""
    for seed in range(50):
        (prompt,) = random_prompts((9,), seed=seed)
        output = ids(llm.generate([prompt], greedy(24), use_tqdm=False))[0]
        if max(output) < 127 and min(output) > 32:
            return prompt, output
    raise AssertionError("no output of fifty is text")


def test_greedy_outputs_are_those_of_the_rule_written_out(llm, plain):
    prompt, output = plain
    for spans in ([(4, 6)], [(2, 5), (10, 12)], [(0, 2), (1, 3), (2, 4), (5, 9)], [(3, 4), (6, 9)], [(0, 24)]):
        words = pieces(output, *spans)
        want, gaps = without_words(llm, prompt, words, 24)
        assert min(gaps) > 1e-3, "too near to tell"
        got = ids(llm.generate([prompt], greedy(24, bad_words=words), use_tqdm=False))[0]
        assert got == want and got != output and not holds(got, words)


def test_words_that_never_come_change_nothing(llm, plain):
    prompt, output = plain
    assert ids(llm.generate([prompt], greedy(24, bad_words=["\x01\x02", "\x03"]), use_tqdm=False))[0] == output


def test_tokens_of_the_prompt_are_no_part_of_a_word(llm):
    asked = greedy(4, bad_words=["ab"], logit_bias={98: 100.0})
    assert ids(llm.generate([list(b"xa")], asked, use_tqdm=False)) == [[98] * 4]


TWINS = [a + b for a in "abcdefghij~" for b in "abcde"]


def params_of(index):
    sampled = dict(temperature=1.0, seed=index, top_p=0.9) if index % 2 else dict(temperature=0)
    bias = {i: 30.0 for i in b"abcdefghij"}
    return SamplingParams(max_tokens=32, ignore_eos=True, bad_words=TWINS, logit_bias=bias, **sampled)


@pytest.fixture(scope="module")
def crowd(llm):
    """Prompts, settings with words for two of three, and outputs of each alone."""
    prompts = random_prompts((3, 17, 9, 33, 12, 40, 7, 21), seed=6)
    params = [params_of(i) if i % 3 else greedy(32) for i in range(8)]
    return prompts, params, [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]


def test_neighbours_and_rows_are_what_they_are_alone_and_nothing_compiles(llm, crowd):
    prompts, params, alone = crowd
    compiles = COMPILES.count
    assert ids(llm.generate(prompts, params, use_tqdm=False)) == alone
    assert COMPILES.count == compiles
    assert not any(holds(output, TWINS) for i, output in enumerate(alone) if i % 3)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_steps_nothing(make_llm, crowd, preemption):
    prompts, params, alone = crowd
    llm = make_llm(**SCARCE, reservation="optimistic", preemption=preemption, enable_prefix_caching=True)
    before = llm.engine.scheduler.counters.preemptions
    assert ids(llm.generate(prompts, params, use_tqdm=False)) == alone
    assert llm.engine.scheduler.counters.preemptions > before
    assert_idle_clean(llm)


def test_every_choice_keeps_to_it(llm):
    asked = SamplingParams(
        n=6, temperature=1.5, seed=3, max_tokens=40, bad_words=TWINS, allowed_token_ids=(*b"abcdez",)
    )
    first, again = (llm.generate([[1, 2]], asked, use_tqdm=False)[0].outputs for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.text for c in first}) == 6
    assert all(len(c.text) == 40 and not holds(c.token_ids, TWINS) for c in first)


def test_words_and_a_grammar_bar_together(llm):
    def text(regex, words, **more):
        wanted = StructuredOutputs(regex=regex)
        asked = SamplingParams(temperature=0, max_tokens=20, structured_outputs=wanted, bad_words=words, **more)
        (choice,) = llm.generate([[1, 2]], asked, use_tqdm=False)[0].outputs
        assert choice.finish_reason == "stop", choice
        return choice.text

    for bias in ({97: 50.0}, {98: 50.0}):
        assert text("[ab]{6}", ["aa", "bb"], logit_bias=bias) in ("ababab", "bababa")
    assert text("a+", ["aaa"]) in ("a", "aa")  # its end is what is left
    assert text("[abc]{5}", ["b", "cc", "aa"], logit_bias={99: 90.0}) == "cacac"


def test_ends_are_left_as_they_were(llm):
    # After the first letter only EOS is left, which min_tokens holds off while it may.
    asked = dict(temperature=0, max_tokens=8, allowed_token_ids=(97, EOS_ID), bad_words=["aa"], logit_bias={97: 90.0})
    (choice,) = llm.generate([[1, 2]], SamplingParams(**asked, min_tokens=1), use_tqdm=False)[0].outputs
    assert choice.token_ids == [97, EOS_ID] and choice.finish_reason == "stop"
    (choice,) = llm.generate([[1, 2]], SamplingParams(**asked, ignore_eos=True), use_tqdm=False)[0].outputs
    assert choice.token_ids == [97, EOS_ID] * 4 and choice.finish_reason == "length"


ALL_THREE = "bad_words and allowed_token_ids and min_tokens leave no token after"


@pytest.mark.parametrize(
    ("fields", "kept", "fault"),
    [
        (
            dict(allowed_token_ids=(97, 98), bad_words=["aa", "ab", "ba", "bb"]),
            1,
            "bad_words and allowed_token_ids leave no token after 1 output tokens",
        ),
        (dict(allowed_token_ids=(97, EOS_ID), bad_words=["aaa"], min_tokens=5), 2, f"{ALL_THREE} 2 output tokens"),
        (
            dict(allowed_token_ids=(97, 98), bad_words=["aa"], stop_token_ids=(98,), min_tokens=3),
            1,
            f"{ALL_THREE} 1 output tokens",
        ),
    ],
    ids=str,
)
def test_words_that_leave_nothing_end_their_request_alone(llm, fields, kept, fault):
    free = [greedy(10), greedy(10, bad_words=["zz"])]
    alone = [ids(llm.generate([[5, 6]], p, use_tqdm=False))[0] for p in free]
    failing = SamplingParams(temperature=0, max_tokens=10, logit_bias={97: 50.0}, **fields)
    outputs = llm.generate([[5, 6]] * 3, [failing, *free], use_tqdm=False)
    (failed,) = outputs[0].outputs
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("unfollowable", fault, kept)
    assert ids(outputs[1:]) == alone
    assert_idle_clean(llm)


def test_masks_of_grammars_that_cannot_be_made_are_nothing_to_words(llm, monkeypatch):
    words = greedy(10, bad_words=["zz"])
    want = ids(llm.generate([[5, 6]], words, use_tqdm=False))[0]

    def broken(matchers, masks):
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.engine._grammars.compiler, "fill_masks", broken)
    bound = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-z]{9}"))
    outputs = llm.generate([[5, 6]] * 2, [bound, words], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and ids(outputs)[1] == want


def test_words_need_a_tokenizer(make_llm):
    with pytest.raises(ValueError, match="no tokenizer is loaded"):
        make_llm(skip_tokenizer_init=True).generate([[1]], greedy(2, bad_words=["ab"]), use_tqdm=False)
