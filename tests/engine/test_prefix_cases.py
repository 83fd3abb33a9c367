"""Faults that users of other engines reported with prefix caches and preemption, on the real steps."""

import pytest

from jaxserve import SamplingParams
from jaxserve.core import Terms
from jaxserve.engine.validation import make_requests
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts

PAGE = 16


@pytest.fixture
def llm(make_llm):
    """An engine whose cache is empty."""
    made = make_llm(num_pages=80)
    made.engine.reset_prefix_cache()
    return made


def logprobs_of(output):
    """Of every token listed: the chosen one first."""
    return [each.logprob for entry in output.outputs[0].logprobs for each in entry.values()]


def test_a_fully_cached_prompt_still_computes_its_last_token(llm):
    """PFX-1: a prompt of whole pages, three times, then one token longer."""
    (prompt,) = random_prompts((3 * PAGE + 1,), seed=8)
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    before = llm.engine.stats.iterations
    first, second, third = (llm.generate([prompt[:-1]], asked, use_tqdm=False)[0] for _ in range(3))
    assert llm.engine.stats.iterations == before + 3, "a step for each, and none without a token"
    assert [o.num_cached_tokens for o in (first, second, third)] == [0, 2 * PAGE, 2 * PAGE]
    assert ids([first]) == ids([second]) == ids([third])
    assert len(logprobs_of(first)) >= 5
    for warm in (second, third):
        assert logprobs_of(warm) == pytest.approx(logprobs_of(first), abs=1e-4)
    (longer,) = llm.generate([prompt], asked, use_tqdm=False)
    assert longer.num_cached_tokens == 3 * PAGE
    llm.engine.reset_prefix_cache()
    (cold,) = llm.generate([prompt], asked, use_tqdm=False)
    assert cold.num_cached_tokens == 0 and ids([cold]) == ids([longer])
    assert logprobs_of(longer) == pytest.approx(logprobs_of(cold), abs=1e-4)


def test_a_prompt_is_shared_while_its_first_copy_still_decodes(llm):
    """PFX-1."""
    (prompt,) = random_prompts((3 * PAGE,), seed=9)
    engine, taken = llm.engine, {0: [], 1: []}
    for index in range(2):
        (request,) = make_requests(prompt, greedy(20), engine.limits, request_id=f"p{index}", draw_seed=lambda: 0)
        engine.add(request, 0, lambda delta, index=index: taken[index].extend(delta.token_ids))
        for _ in range(3):
            engine.step()
        # The first of them goes on; pages that both hold count once.
    assert engine.scheduler.sequence("p1").num_cached_tokens == 2 * PAGE
    assert engine.scheduler.pages_owned < 2 * 4
    while engine.has_work:
        engine.step()
    assert taken[0] == taken[1] and len(taken[0]) == 20
    assert_idle_clean(llm)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prompt_scores_do_not_depend_on_what_is_cached(llm, order):
    """PFX-2: overlapping prompts in both orders, then scores."""
    (long,) = random_prompts((4 * PAGE + 3,), seed=10)
    prompts = [long, long[: 2 * PAGE + 5]]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    cold = {}
    for which in order:
        llm.engine.reset_prefix_cache()
        cold[which] = llm.generate([prompts[which]], asked, use_tqdm=False)[0].prompt_logprobs
    llm.engine.reset_prefix_cache()
    for which in order:
        llm.generate([prompts[which]], greedy(4), use_tqdm=False)
    for which in order:
        warm = llm.generate([prompts[which]], asked, use_tqdm=False)[0].prompt_logprobs
        assert len(warm) == len(prompts[which]) and warm[0] is None
        for got, want in zip(warm[1:], cold[which][1:], strict=True):
            assert got.keys() == want.keys()
            assert [e.logprob for e in got.values()] == pytest.approx([e.logprob for e in want.values()], abs=1e-4)


def test_salts_separate_and_change_no_output(llm):
    """PFX-3."""
    (prompt,) = random_prompts((3 * PAGE,), seed=11)
    outputs = [
        llm.generate([prompt], greedy(6), terms=Terms(cache_salt=salt), use_tqdm=False)[0]
        for salt in ("a", "a", "b", "")
    ]
    assert [o.num_cached_tokens for o in outputs] == [0, 2 * PAGE, 0, 0]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1


@pytest.mark.parametrize("in_flight", [0, 1])
def test_an_aborted_prefill_leaves_only_whole_pages(make_llm, in_flight):
    """PFX-6: a prompt of eight chunks, aborted after each of the first seven, then sent again.

    With the last of these chunks in flight it is as if there had been one less.
    """
    llm = make_llm(prefill_chunk=12, num_pages=80)
    engine = llm.engine
    (prompt,) = random_prompts((92,), seed=12)
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    engine.reset_prefix_cache()
    want = llm.generate([prompt], asked, use_tqdm=False)[0]
    for chunks in range(1, 8):
        engine.reset_prefix_cache()
        (request,) = make_requests(prompt, asked, engine.limits, request_id="gone", draw_seed=lambda: 0)
        engine.add(request, 0, lambda delta: None)
        for _ in range(chunks):
            engine.step()
        if not in_flight:
            engine.land()
        assert engine.abort("gone")
        engine.land()
        assert_idle_clean(llm)
        again = llm.generate([prompt], asked, use_tqdm=False)[0]
        assert again.num_cached_tokens == min((chunks - in_flight) * 12, 91) // PAGE * PAGE
        assert ids([again]) == ids([want])
        assert logprobs_of(again) == pytest.approx(logprobs_of(want), abs=1e-4)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_a_preempted_request_streams_each_token_once(make_llm, kind):
    """PRE-1: pages for one and a half requests, four of 64 tokens."""
    llm = make_llm(page_size=4, num_pages=34, max_num_seqs=4, reservation="optimistic", preemption="recompute")
    lone = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    prompts = random_prompts((20, 23, 24, 17), seed=13)
    asked = [
        greedy(64) if kind == "greedy" else SamplingParams(temperature=0.8, seed=index, max_tokens=64, ignore_eos=True)
        for index in range(4)
    ]
    before = llm.engine.scheduler.counters.preemptions
    got = ids(llm.generate(prompts, asked, use_tqdm=False))
    assert llm.engine.scheduler.counters.preemptions > before
    for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        assert got[index] == ids(lone.generate([prompt], params, use_tqdm=False))[0]
        assert len(got[index]) == 64
    assert_idle_clean(llm)
