"""What a request gets does not depend on what the scheduler did to it or to its neighbours.

Every prompt runs alone first, on an engine without prefix cache; then all together under each policy
that interrupts, shares or holds back. Greedy and seeded sampling alike, on the real step functions.
"""

import pytest

from jaxserve import SamplingParams
from jaxserve.core import Terms
from jaxserve.runtime import COMPILES
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts

LENGTHS = (3, 40, 17, 60, 33, 9, 48, 16, 64, 5, 31, 22)
COUNT = 24


def params(kind):
    if kind == "greedy":
        return [greedy(COUNT) for _ in LENGTHS]
    return [
        SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=COUNT, ignore_eos=True, presence_penalty=0.3)
        for i in range(len(LENGTHS))
    ]


@pytest.fixture(scope="module")
def prompts():
    """Of several lengths; every third shares the first 32 tokens of the longest."""
    made = random_prompts(LENGTHS, seed=3)
    for index in range(0, len(made), 3):
        made[index] = made[8][:32] + made[index]
    return made


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def case(request, make_llm, prompts):
    """(sampling settings, ids of each prompt when it runs alone)."""
    llm = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    settings = params(request.param)
    return settings, [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, settings, strict=True)]


SCARCE = {"page_size": 4, "num_pages": 62, "max_num_seqs": 8}  # two or three requests' worth


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("reservation", ["optimistic", "expected"])
def test_recomputed_requests_get_the_same(make_llm, prompts, case, reservation, cache):
    settings, alone = case
    llm = make_llm(**SCARCE, reservation=reservation, preemption="recompute", enable_prefix_caching=cache)
    counters = llm.engine.scheduler.counters
    before = counters.preemptions
    assert ids(llm.generate(prompts, settings, use_tqdm=False)) == alone
    if reservation == "optimistic":
        assert counters.preemptions > before, "nothing was preempted: the test shows nothing"
    assert_idle_clean(llm)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_swapped_requests_get_the_same(make_llm, prompts, case, preemption, cache):
    settings, alone = case
    llm = make_llm(**SCARCE, reservation="optimistic", preemption=preemption, enable_prefix_caching=cache)
    counters, engine = llm.engine.scheduler.counters, llm.engine
    before = counters.swapped_pages
    engine.reset_prefix_cache()
    engine.runner.fill_pool(float("nan"))
    compiles = COMPILES.count
    assert ids(llm.generate(prompts, settings, use_tqdm=False)) == alone
    if preemption == "swap":
        assert counters.swapped_pages > before, "nothing was swapped: the test shows nothing"
    assert COMPILES.count == compiles
    labels = {"model_name": engine.model_name, "engine": "0", "service_class": ""}
    counted = engine.metrics.registry.get_sample_value("jaxserve:preemption_swapped_bytes_total", labels)
    assert counted == counters.swapped_pages * engine.runner.page_bytes
    assert engine.scheduler.host_pages_free == engine.runner.scheduler_config.num_host_pages
    assert_idle_clean(llm)


def test_a_full_host_pool_makes_them_recompute(make_llm, prompts, case):
    settings, alone = case
    page_gib = 2 * 2 * 2 * 4 * 16 * 4 / 2**30  # of the tiny model: layers, K and V, heads, tokens, head size, bytes
    llm = make_llm(**SCARCE, reservation="optimistic", preemption="swap", swap_space=15 * page_gib)
    assert llm.engine.runner.scheduler_config.num_host_pages == 15
    counters = llm.engine.scheduler.counters
    before = counters.swapped_pages, counters.recomputed_tokens
    assert ids(llm.generate(prompts, settings, use_tqdm=False)) == alone
    assert counters.swapped_pages > before[0] and counters.recomputed_tokens > before[1]
    assert_idle_clean(llm)


@pytest.mark.parametrize("preemption", ["pause", "swap", "recompute"])
def test_requests_that_lost_their_slot_to_a_higher_class_get_the_same(make_llm, prompts, case, preemption):
    settings, alone = case
    llm = make_llm(max_num_seqs=2, priority_preemption=True, preemption=preemption, enable_prefix_caching=False)
    counters, engine = llm.engine.scheduler.counters, llm.engine
    before = counters.preemptions
    # Each arrival outranks all before it, and some steps lie between them.
    got = run_in_turns(engine, prompts, settings, [Terms(priority=-index) for index in range(len(prompts))])
    assert got == alone
    assert counters.preemptions > before
    assert_idle_clean(llm)


def run_in_turns(engine, prompts, settings, terms, *, steps=5, aborted=()):
    """Ids of each prompt when they arrive `steps` iterations apart; those in `aborted` leave after three more."""
    from jaxserve.engine.validation import make_requests

    outputs = [[] for _ in prompts]
    for index, (prompt, setting, term) in enumerate(zip(prompts, settings, terms, strict=True)):
        (request,) = make_requests(
            prompt, setting, engine.limits, request_id=f"t{index}", terms=term, draw_seed=lambda: 0
        )
        engine.add(request, 0, lambda delta, index=index: outputs[index].extend(delta.token_ids))
        for step in range(steps):
            engine.step()
            if step == 2 and index in aborted:
                engine.abort(f"t{index}")
    while engine.has_work:
        engine.step()
    return outputs


def test_a_warm_prefix_cache_changes_nothing(make_llm, prompts, case):
    settings, alone = case
    llm = make_llm(num_pages=80)
    llm.engine.reset_prefix_cache()
    cold = llm.generate(prompts, settings, use_tqdm=False)
    warm = llm.generate(prompts, settings, use_tqdm=False)
    assert ids(cold) == ids(warm) == alone
    for prompt, output in zip(prompts, warm, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    llm.engine.reset_prefix_cache()
    assert [o.num_cached_tokens for o in llm.generate(prompts[:1], settings[:1], use_tqdm=False)] == [0]


def test_a_prompt_that_continues_an_output_finds_its_pages(make_llm, prompts, case):
    settings, alone = case
    llm = make_llm(num_pages=80)
    llm.generate(prompts[:1], settings[:1], use_tqdm=False)
    # The last output token's K/V was never written, so the page it completes is not there.
    turn = prompts[0] + alone[0]
    (again,) = llm.generate([turn], greedy(4), use_tqdm=False)
    assert again.num_cached_tokens == (len(turn) - 1) // 16 * 16
    (cold,) = make_llm(max_num_seqs=1, enable_prefix_caching=False).generate([turn], greedy(4), use_tqdm=False)
    assert ids([again]) == ids([cold])


def test_prompt_scores_are_computed_although_the_pages_are_cached(make_llm, prompts):
    llm = make_llm(num_pages=80)
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    first, second = (llm.generate(prompts[:1], asked, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    got, want = ([next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]] for o in (second, first))
    assert len(got) == len(prompts[0]) - 1 and got == pytest.approx(want, abs=1e-4)


def test_tenants_and_salts_do_not_share(make_llm, prompts):
    llm = make_llm(num_pages=80)
    llm.engine.reset_prefix_cache()
    one = prompts[0]
    found = [
        llm.generate([one], greedy(2), terms=terms, use_tqdm=False)[0].num_cached_tokens
        for terms in (Terms(), Terms(), Terms(tenant="a"), Terms(cache_salt="s"), Terms(tenant="a"))
    ]
    shared = (len(one) - 1) // 16 * 16
    assert found == [0, shared, 0, 0, shared]


@pytest.mark.parametrize("batching", ["static", "request_dynamic"])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair"])
def test_other_orders_and_batching_schemes_change_nothing(make_llm, prompts, case, batching, policy):
    settings, alone = case
    llm = make_llm(max_num_seqs=4, batching=batching, policy=policy)
    terms = [Terms(tenant=str(i % 3)) for i in range(len(prompts))]
    assert ids(llm.generate(prompts, settings, terms=terms, use_tqdm=False)) == alone


def test_aborted_neighbours_change_nothing(make_llm, prompts, case):
    settings, alone = case
    llm = make_llm(max_num_seqs=4, reservation="exact", num_pages=40)
    gone = range(1, len(prompts), 2)
    got = run_in_turns(llm.engine, prompts, settings, [Terms()] * len(prompts), aborted=gone)
    assert got[::2] == alone[::2]
    for index in gone:
        assert got[index] == alone[index][: len(got[index])]
    assert_idle_clean(llm)
