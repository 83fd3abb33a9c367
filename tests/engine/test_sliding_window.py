"""A model whose every layer has a sliding window: pages that no layer sees any more are given back.

What a request gets is what it gets where no page is ever given back. Nothing of a page that was given back is read:
the null page, which stands for it, holds NaN, and so do pages that nobody has written yet.
"""

import jax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.models import one_group
from jaxserve.runtime import engine_shapes
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.replayer import replay
from jaxserve.testing.tiny import write_tiny_model
from pallas_kernels.common import native
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.engine.poisoned import generate, poison

WINDOW, PAGE = 22, 4
LENGTHS = (3, 40, 70, 5, 2, 33, 9, 4, 16, 64, 6, 1)
COUNT = 40
SETTINGS = dict(
    dtype="float32",
    compile_cache="",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    page_size=PAGE,
    decode_buckets=(4,),
    prefill_buckets=(24,),
    table_width_buckets=(32,),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Mistral; its window ends within a page."""
    path = tmp_path_factory.mktemp("windowed")
    return str(
        write_tiny_model(
            path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW, max_position=1024
        )
    )


@pytest.fixture(scope="module")
def prompts():
    """Of several lengths; every third begins alike."""
    made = random_prompts(LENGTHS, seed=3)
    for index in range(0, len(made), 3):
        made[index] = made[2][:32] + made[index][:40]
    return made


def keep_all(windows, max_model_len, page_size):
    """Layer groups under which no page is given back."""
    return one_group((None,) * len(windows))


def params(kind):
    if kind == "greedy":
        return [greedy(COUNT) for _ in LENGTHS]
    seeded = dict(temperature=0.9, top_p=0.95, max_tokens=COUNT, ignore_eos=True)
    return [SamplingParams(seed=seed, **seeded) for seed in range(len(LENGTHS))]


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def case(request, expected):
    return params(request.param), expected[request.param]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Ids of each prompt where it runs alone and keeps its pages to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shapes, "group_layers", keep_all)
        llm = LLM(model, **SETTINGS | dict(max_num_seqs=1, overlap=False, enable_prefix_caching=False))
    assert llm.engine.runner.scheduler_config.sliding_window == 0
    assert llm.engine.runner.memory_plan.num_pages == 128 // PAGE + 1
    return {
        kind: [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params(kind), strict=True)]
        for kind in ("greedy", "seeded")
    }


@pytest.fixture(scope="module")
def make_llm(model):
    """`make_llm(**settings)`: an engine of the model, shared by settings."""
    made = {}

    def make(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = LLM(model, **SETTINGS | settings)
        return made[key]

    yield make
    for llm in made.values():
        assert_idle_clean(llm)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_ids_are_those_of_a_request_that_keeps_its_pages(make_llm, prompts, case, overlap, cache):
    settings, alone = case
    llm = make_llm(overlap=overlap, enable_prefix_caching=cache, **({"num_pages": 300} if cache else {}))
    if not cache:  # 12 pages hold 24 tokens of a chunk, the 21 before them, and the ends of both
        assert llm.engine.runner.memory_plan.num_pages == 4 * 12 + 1
    assert generate(llm, prompts, settings) == alone
    if cache:
        warm = llm.generate(prompts, settings, use_tqdm=False)
        assert ids(warm) == alone
        assert [output.num_cached_tokens for output in warm] == [(len(each) - 1) // PAGE * PAGE for each in prompts]


@pytest.mark.parametrize("chunk", [5, 8])
def test_chunks_smaller_than_the_window(make_llm, prompts, case, chunk):
    settings, alone = case
    assert generate(make_llm(prefill_chunk=chunk), prompts, settings) == alone


@pytest.mark.parametrize("chunks", [(4, 32), pytest.param((8, 12), marks=pytest.mark.slow)])
def test_krn_7_chunks_from_half_a_window_to_four_windows_give_the_same(tmp_path, chunks):
    """A window of two pages; prompts up to four windows, whose pages others take while they run."""
    config = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8)
    model = str(write_tiny_model(tmp_path, **config))
    settings = SETTINGS | dict(
        max_model_len=64, max_num_seqs=2, max_num_batched_tokens=34, decode_buckets=(2,), prefill_buckets=(34,)
    )
    settings |= dict(table_width_buckets=(16,), enable_prefix_caching=False)
    prompts = random_prompts((32, 7, 29, 8, 9, 31, 16, 3), seed=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shapes, "group_layers", keep_all)
        lone = LLM(model, **settings, prefill_chunk=34, num_pages=33)
    alone = [ids(lone.generate([prompt], greedy(12), use_tqdm=False))[0] for prompt in prompts]
    for chunk in chunks:
        llm = LLM(model, **settings, prefill_chunk=chunk)
        assert llm.engine.runner.scheduler_config.sliding_window == 8
        assert generate(llm, prompts, greedy(12)) == alone, chunk
        assert_idle_clean(llm)


@pytest.mark.parametrize(
    ("attention", "decoder"),
    [("reference", "xla"), ("cpu", "xla"), ("native_cpu", "xla"), ("native_cpu", "native_cpu")],
)
def test_every_implementation(make_llm, prompts, expected, attention, decoder):
    if attention == "native_cpu" and not native.is_available():
        pytest.skip("the extra `cpu` is not installed")
    llm = make_llm(attention_implementation=attention, decoder_implementation=decoder)
    assert generate(llm, prompts, params("greedy")) == expected["greedy"]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_get_the_same(make_llm, prompts, case, preemption, cache):
    settings, alone = case
    llm = make_llm(reservation="optimistic", preemption=preemption, num_pages=19, enable_prefix_caching=cache)
    counters = llm.engine.scheduler.counters
    before = counters.preemptions, counters.swapped_pages
    # Those that have most to grow first.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = generate(llm, [prompts[index] for index in order], [settings[index] for index in order])
    assert found == [alone[index] for index in order]
    assert counters.preemptions > before[0], "nothing was preempted: the test shows nothing"
    assert (counters.swapped_pages > before[1]) == (preemption == "swap")


@pytest.mark.parametrize("reservation", ["exact", "expected"])
def test_other_reservations(make_llm, prompts, case, reservation):
    settings, alone = case
    llm = make_llm(reservation=reservation, preemption="recompute", num_pages=27)
    assert generate(llm, prompts, settings) == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_several_steps_in_one_dispatch(make_llm, prompts, case, overlap):
    settings, alone = case
    llm = make_llm(overlap=overlap, max_decode_steps=8, max_arrival_delay_s=1e6)
    assert generate(llm, prompts, settings) == alone


def test_a_request_far_longer_than_the_pool(make_llm, model):
    """900 tokens in a pool of 48: whoever keeps its pages is refused."""
    settings = dict(max_model_len=1024, max_num_seqs=1, num_pages=13, table_width_buckets=(256,), decode_buckets=(1,))
    llm = make_llm(**settings)
    prompt = random_prompts((300,), seed=5)[0]
    found = generate(llm, [prompt], greedy(600))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shapes, "group_layers", keep_all)
        keeping = LLM(model, **SETTINGS | settings | {"num_pages": 257})
        refused = LLM(model, **SETTINGS | settings)
    assert found == ids(keeping.generate([prompt], greedy(600), use_tqdm=False))
    with pytest.raises(ValueError, match="need 225 KV pages of 4; the pool has 12"):
        refused.generate([prompt], greedy(600), use_tqdm=False)


def test_replay_is_byte_identical(model, prompts, tmp_path):
    path = tmp_path / "trace.jsonl"
    llm = LLM(model, **SETTINGS | dict(trace_file=str(path), reservation="optimistic", preemption="auto", num_pages=19))
    llm.generate(prompts, params("greedy"), use_tqdm=False)
    llm.engine.close()
    reader = TraceReader(path)
    assert reader.header.config.sliding_window == WINDOW
    report = replay(reader)
    assert report.difference is None and report.num_requests == len(prompts)


def test_the_plan_tells_what_a_request_holds(make_llm):
    plan = make_llm().engine.runner.memory_plan
    assert (plan.sliding_window, plan.most_pages_per_seq) == (WINDOW, 12)
    assert ("pages of a request, by its window of 22 tokens", "12 at most") in plan.rows()


def test_scores_of_a_long_prompt_in_few_pages(make_llm):
    """`prompt_logits` goes round the pool."""
    llm = make_llm(max_num_seqs=1, num_pages=13, decode_buckets=(1,))
    prompt = random_prompts((100,), seed=6)[0]
    poison(llm)
    rows = list(llm.engine.runner.prompt_logits(prompt))
    large = list(make_llm().engine.runner.prompt_logits(prompt))
    for found, wanted in zip(rows, large, strict=True):
        assert jax.numpy.allclose(found, wanted, atol=1e-4)
    poison(llm)
