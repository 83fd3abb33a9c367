"""Settings that bar tokens, put together at random: what is sampled is what the rules leave, or the reason is told."""

import random
from collections import Counter

import pytest

from jaxserve.core import SamplingParams, StructuredOutputs, Submission
from jaxserve.testing.tiny import EOS_ID, IM_END_ID
from tests.engine.conftest import assert_idle_clean

LETTERS, ENDS = tuple(b"abcd"), (EOS_ID, IM_END_ID)
CHOICES = ("ab", "abc", "abd", "ba", "ddddd")
MAX_TOKENS = 8


def draw(rng):
    """Settings of a few tokens, so that they often contradict each other."""
    lengths = rng.choice(((), (1,), (2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2, 3, 3)))
    return SamplingParams(
        temperature=rng.choice((0, 1.5)),
        seed=1,
        max_tokens=MAX_TOKENS,
        min_tokens=rng.choice((0, 0, 2, MAX_TOKENS)),
        ignore_eos=rng.random() < 0.5,
        allowed_token_ids=tuple(rng.sample(LETTERS + ENDS, rng.randint(1, 4))),
        stop_token_ids=tuple(rng.sample(LETTERS, rng.choice((0, 0, 1, 2)))),
        bad_words=tuple("".join(rng.choices("abcd", k=length)) for length in lengths),
        logit_bias={token_id: rng.choice((-100.0, 100.0)) for token_id in rng.sample(range(264), 60)},
        repetition_penalty=rng.choice((1.0, 0.01, 100.0)),
        structured_outputs=StructuredOutputs(choice=CHOICES) if rng.random() < 0.4 else None,
    )


def left(params, output):
    """The ids that the rules leave after an output, written out; and whether it may end there without one."""
    ids = set(params.allowed_token_ids)
    for word in params.bad_words:
        *begin, last = word.encode()
        if output[len(output) - len(begin) :] == begin:
            ids.discard(last)
    eos = set() if params.ignore_eos else set(ENDS)
    early = len(output) < params.min_tokens
    if params.structured_outputs is None:
        return ids - (eos | set(params.stop_token_ids) if early else set()), False
    text = bytes(output).decode()
    complete = text in CHOICES
    follows = {ord(choice[len(text)]) for choice in CHOICES if choice.startswith(text) and choice != text}
    # An output that nothing can follow ends by itself, without EOS.
    ids &= follows | (eos if complete and follows and not early else set())
    # A grammar's own tokens are let through where nothing but stop ids is left.
    return (ids - set(params.stop_token_ids) if early else set()) or ids, complete


def check(params, choice):
    """Asserts that an output is one that the rules allow, and ends where they say."""
    output = choice.token_ids
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(ENDS))
    for place, token_id in enumerate(output):
        assert token_id in left(params, output[:place])[0], (params, output)
        last = token_id in stops and place >= params.min_tokens
        assert not last or (place + 1 == len(output) and choice.finish_reason == "stop"), (params, output)
    ids, may_end = (set(), False) if output and output[-1] in ENDS and not params.ignore_eos else left(params, output)
    match choice.finish_reason:
        case "length":
            assert len(output) == MAX_TOKENS
        case "unfollowable":
            assert output and not ids and not may_end and "no token" in choice.error, (params, output, choice.error)
        case "stop":
            assert (output[-1:] and output[-1] in stops) or (may_end and not ids), (params, output)
        case other:
            raise AssertionError(f"{other}: {choice.error} {params}")


@pytest.mark.parametrize("seed", range(3))
def test_random_settings_are_kept_or_refused_with_the_reason(llm, seed):
    rng, taken, refused = random.Random(seed), [], 0
    for index in range(200):
        params = draw(rng)
        try:
            llm.engine.make_requests(Submission([5, 6], params, str(index)), 0.0)
        except ValueError as error:
            assert left(params, []) == (set(), False) and "no" in str(error), (params, error)
            refused += 1
        else:
            assert left(params, [])[0], params
            taken.append(params)
    outputs = llm.generate([[5, 6]] * len(taken), taken, use_tqdm=False)
    for params, output in zip(taken, outputs, strict=True):
        check(params, output.outputs[0])
    reasons = Counter(output.outputs[0].finish_reason for output in outputs)
    assert refused > 20 and min(reasons[reason] for reason in ("stop", "length", "unfollowable")) > 10, reasons
    assert_idle_clean(llm)
