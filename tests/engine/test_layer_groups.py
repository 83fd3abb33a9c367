"""Models of which some layers have a sliding window: layers in groups, each with pages of its own.

What a request gets is what it gets where all layers are one group and no page is ever given back. Nothing of a page
that was given back is read: the null page, which stands for it, holds NaN, and so do pages that nobody has written yet.
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
from tests.models.tiny_models import FOLDER

PAGE, CONTEXT = 4, 96
WINDOW = 8
LENGTHS = (3, 40, 55, 5, 2, 33, 9, 4, 16, 50, 6, 1)
COUNT = 36
SETTINGS = dict(
    dtype="float32",
    compile_cache="",
    skip_tokenizer_init=True,
    max_model_len=CONTEXT,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    page_size=PAGE,
    decode_buckets=(4,),
    prefill_buckets=(24,),
    table_width_buckets=(CONTEXT // PAGE,),
)
GOLDEN = ("gemma2_softcap", "gemma3_dual_rope", "gpt_oss_sinks")
LAYERS = ("sliding_attention", "sliding_attention", "full_attention") * 2
MODEL = "gemma3_dual_rope"
"""That runs under every setting; the others under a few."""


@pytest.fixture(scope="session")
def path_of(tmp_path_factory):
    """`path_of(name)`: a tiny golden model, or "mistral", whose layers can all be one call on CPU."""

    def path(name):
        if name != "mistral":
            return str(FOLDER / name)
        folder = tmp_path_factory.getbasetemp() / "grouped_mistral"
        if not folder.exists():
            write_tiny_model(
                folder,
                architectures=["MistralForCausalLM"],
                model_type="mistral",
                sliding_window=WINDOW,
                num_hidden_layers=len(LAYERS),
                layer_types=list(LAYERS),
            )
        return str(folder)

    return path


@pytest.fixture(scope="module")
def prompts():
    """Of several lengths; every third begins alike."""
    made = random_prompts(LENGTHS, seed=3)
    for index in range(0, len(made), 3):
        made[index] = made[2][:32] + made[index][:20]
    return made


def params(kind):
    if kind == "greedy":
        return [greedy(COUNT) for _ in LENGTHS]
    seeded = dict(temperature=0.9, top_p=0.95, max_tokens=COUNT, ignore_eos=True)
    return [SamplingParams(seed=seed, **seeded) for seed in range(len(LENGTHS))]


def keep_all(windows, max_model_len, page_size):
    """Layer groups under which no page is given back."""
    return one_group((None,) * len(windows))


@pytest.fixture(scope="module")
def alone(path_of, prompts):
    """`alone(name, kind)`: ids of each prompt where it runs alone and keeps its pages to its end."""
    found = {}

    def run(name, kind):
        if (name, kind) not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_shapes, "group_layers", keep_all)
                llm = LLM(path_of(name), **SETTINGS | dict(overlap=False, enable_prefix_caching=False))
            assert llm.engine.runner.scheduler_config.windows == (0,)
            pairs = [list(zip(prompts, params(each), strict=True)) for each in ("greedy", "seeded")]
            for each, requests in zip(("greedy", "seeded"), pairs, strict=True):
                found[name, each] = [ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in requests]
        return found[name, kind]

    return run


@pytest.fixture(scope="module")
def make_llm(path_of):
    """`make_llm(name, **settings)`: an engine of a model, shared by settings."""
    made = {}

    def make(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in made:
            made[key] = LLM(path_of(name), **SETTINGS | settings)
            assert set(made[key].engine.runner.scheduler_config.group_windows) == {0, WINDOW}
        return made[key]

    yield make
    for llm in made.values():
        assert_idle_clean(llm)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("name", [*GOLDEN, "mistral"])
def test_ids_are_those_of_a_request_that_keeps_its_pages(make_llm, prompts, alone, name, kind):
    """Chunks, rows beside each other, one step ahead; then again with what the prefix cache has."""
    llm = make_llm(name, num_pages=1200)
    assert generate(llm, prompts, params(kind)) == alone(name, kind)
    warm = llm.generate(prompts, params(kind), use_tqdm=False)
    assert ids(warm) == alone(name, kind)
    assert [output.num_cached_tokens for output in warm] == [(len(each) - 1) // PAGE * PAGE for each in prompts]


@pytest.mark.parametrize("settings", [dict(overlap=False), dict(prefill_chunk=5), dict(scan_layers=True)], ids=str)
def test_other_ways_to_run(make_llm, prompts, alone, settings):
    assert generate(make_llm(MODEL, **settings), prompts, params("seeded")) == alone(MODEL, "seeded")


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_get_the_same(make_llm, prompts, alone, preemption, cache):
    llm = make_llm(MODEL, reservation="optimistic", preemption=preemption, num_pages=45, enable_prefix_caching=cache)
    counters = llm.engine.scheduler.counters
    assert generate(llm, prompts, params("seeded")) == alone(MODEL, "seeded")
    assert counters.preemptions > 0, "nothing was preempted: the test shows nothing"
    assert (counters.swapped_pages > 0) == (preemption == "swap")


@pytest.mark.parametrize("overlap", [False, True])
def test_several_steps_in_one_dispatch(make_llm, prompts, alone, overlap):
    llm = make_llm(MODEL, overlap=overlap, max_decode_steps=8, max_arrival_delay_s=1e6)
    assert generate(llm, prompts, params("seeded")) == alone(MODEL, "seeded")
    assert llm.engine.scheduler.num_plans < sum(map(len, alone(MODEL, "seeded"))), "no plan had several steps"


@pytest.mark.parametrize(
    ("attention", "decoder"),
    [("reference", "xla"), ("cpu", "xla"), ("native_cpu", "xla"), ("native_cpu", "native_cpu")],
)
def test_every_implementation(make_llm, prompts, alone, attention, decoder):
    if attention == "native_cpu" and not native.is_available():
        pytest.skip("the extra `cpu` is not installed")
    llm = make_llm("mistral", attention_implementation=attention, decoder_implementation=decoder)
    assert generate(llm, prompts, params("greedy")) == alone("mistral", "greedy")


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_pages_with_scales(path_of, prompts, make_llm, kv_cache_dtype):
    """Rounded as they are where no page is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shapes, "group_layers", keep_all)
        keeping = LLM(path_of(MODEL), **SETTINGS | dict(kv_cache_dtype=kv_cache_dtype))
    wanted = ids(keeping.generate(prompts, params("seeded"), use_tqdm=False))
    assert generate(make_llm(MODEL, kv_cache_dtype=kv_cache_dtype), prompts, params("seeded")) == wanted


def test_memory_of_a_grouped_model(make_llm):
    """Six layers, of which two see all: three groups of two, and pages of a third of the size."""
    llm = make_llm(MODEL)
    plan, page = llm.engine.runner.memory_plan, llm.engine.runner.page_bytes
    config = llm.engine.runner._model_config
    assert page == 2 * 2 * config.num_kv_heads * PAGE * config.head_dim * 4
    assert (plan.group_windows, plan.layers_per_group) == ((0, WINDOW, WINDOW), 2)
    # All 24 pages in one group; a chunk of 24 tokens and the 7 before it lie in 9 pages.
    assert plan.most_pages_per_seq == 24 + 9 + 9 and plan.num_pages == 4 * (24 + 9 + 9) + 1
    assert plan.kv_bytes == plan.num_pages * page == sum(x.nbytes for x in jax.tree.leaves(llm.engine.runner._pool))
    assert (plan.max_tokens, plan.max_long_tokens) == (168 // 3 * PAGE, 4 * CONTEXT)
    rows = dict(plan.rows())
    assert rows["groups of 2 layers, each with pages of its own"] == "1 of all tokens, 2 of a window of 8 tokens"
    assert rows["pages of a request, by these windows"] == "42 at most"
    assert plan.kv_bytes < 0.6 * (4 * 24 + 1) * 3 * page, "no less than in one group"


def test_a_long_request_holds_fewer_bytes(make_llm):
    llm = make_llm(MODEL, enable_prefix_caching=False)
    engine = llm.engine
    most = []
    schedule = engine.scheduler.schedule

    def watched(now):
        plan = schedule(now)
        most.append(engine.scheduler.pages_owned)
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", watched)
        poison(llm)
        llm.generate(random_prompts((20,), seed=1), greedy(70), use_tqdm=False)
    # At its end: 23 pages that see all, and 3 of each group with a window; in one group it is 23 pages thrice as large.
    assert max(most[-20:]) == 23 + 3 + 3


def test_replay_is_byte_identical(path_of, prompts, tmp_path):
    path = tmp_path / "trace.jsonl"
    settings = dict(trace_file=str(path), reservation="optimistic", preemption="auto", num_pages=45)
    llm = LLM(path_of(MODEL), **SETTINGS | settings)
    llm.generate(prompts, params("greedy"), use_tqdm=False)
    llm.engine.close()
    reader = TraceReader(path)
    assert reader.header.config.group_windows == (0, WINDOW, WINDOW)
    report = replay(reader)
    assert report.difference is None and report.num_requests == len(prompts)


def test_scores_of_a_long_prompt_in_few_pages(make_llm):
    """`prompt_logits` goes round the pages of each group."""
    prompt = random_prompts((90,), seed=6)[0]
    few = make_llm(MODEL, max_num_seqs=1, num_pages=43, decode_buckets=(1,))
    many = make_llm(MODEL, num_pages=400)
    for llm in (few, many):
        poison(llm)
    rows, wanted = (list(llm.engine.runner.prompt_logits(prompt)) for llm in (few, many))
    assert sum(map(len, rows)) == len(prompt)
    for found, right in zip(rows, wanted, strict=True):
        assert jax.numpy.allclose(found, right, atol=1e-4) and not jax.numpy.isnan(found).any()
    for llm in (few, many):
        poison(llm)
