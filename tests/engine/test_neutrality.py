"""What a request gets does not depend on how it was chunked, batched, paged or placed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.loading import load_model, resolve_model
from jaxserve.models import forward, unembed
from tests.engine.conftest import assert_idle_clean, assert_same_tokens, greedy, ids, random_prompts
from tests.models.tiny_models import FOLDER

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 90)


@pytest.fixture(scope="module")
def dense(tiny_model_dir):
    """Greedy ids and top-two gaps by plain causal attention over the whole sequence, no cache."""
    loaded = load_model(resolve_model(str(tiny_model_dir)), "float32")
    config = loaded.config
    size = 128

    def attend(layer, q, k, v, cache, options):
        group = config.num_heads // config.num_kv_heads
        scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, group, axis=1), precision="highest")
        mask = jnp.tril(jnp.ones((size, size), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores / np.sqrt(config.head_dim), -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, jnp.repeat(v, group, axis=1), precision="highest"), cache

    @jax.jit
    def logits_at(tokens, position):
        hidden, _ = forward(config, loaded.params, tokens, jnp.arange(size), attend, None)
        return unembed(config, loaded.params, hidden[position][None])[0]

    def run(prompt, count):
        tokens = np.zeros(size, np.int32)
        tokens[: len(prompt)] = prompt
        out, gaps = [], []
        for position in range(len(prompt), len(prompt) + count):
            row = np.asarray(logits_at(tokens, position - 1))
            top = np.sort(row)[-2:]
            gaps.append(float(top[1] - top[0]))
            out.append(int(row.argmax()))
            tokens[position] = out[-1]
        return out, gaps

    return run


@pytest.fixture(scope="module")
def expected(dense):
    return [dense(prompt, 12) for prompt in random_prompts(LENGTHS)]


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_chunked_and_batched_equal_dense(make_llm, expected, page_size, chunk):
    llm = make_llm(page_size=page_size, prefill_chunk=chunk, num_pages=8 * 128 // page_size + 1)
    got = ids(llm.generate(random_prompts(LENGTHS), greedy(12), use_tqdm=False))
    for tokens, (want, gaps) in zip(got, expected, strict=True):
        assert_same_tokens(tokens, want, gaps)
    assert_idle_clean(llm)


def test_whole_prompts_equal_dense(make_llm, expected):
    llm = make_llm(max_num_batched_tokens=128, enable_chunked_prefill=False)
    got = ids(llm.generate(random_prompts(LENGTHS), greedy(12), use_tqdm=False))
    for tokens, (want, gaps) in zip(got, expected, strict=True):
        assert_same_tokens(tokens, want, gaps)


def test_experts_of_a_token_do_not_depend_on_its_batch():
    folder = FOLDER / "qwen3_moe"
    golden = json.loads((folder / "golden.json").read_text())
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_chunk=9,
        page_size=4,
        num_pages=129,
        decode_buckets=(4,),
        prefill_buckets=(64,),
        table_width_buckets=(32,),
        compile_cache="",
    )
    prompts = [golden["prompt_ids"], *random_prompts((3, 30, 17), vocab=320)]
    together = ids(llm.generate(prompts, greedy(16), use_tqdm=False))
    assert_same_tokens(together[0], golden["greedy_ids"][:16], golden["greedy_top2_gaps"])
    assert together == [ids(llm.generate(prompt, greedy(16), use_tqdm=False))[0] for prompt in prompts]
    assert_idle_clean(llm)


def test_alone_equals_batched_in_any_order(make_llm, llm, expected):
    prompts = random_prompts(LENGTHS)
    for prompt, (want, gaps) in zip(prompts, expected, strict=True):
        assert_same_tokens(ids(llm.generate(prompt, greedy(12), use_tqdm=False))[0], want, gaps)
    order = np.random.default_rng(1).permutation(len(prompts))
    got = ids(llm.generate([prompts[i] for i in order], greedy(12), use_tqdm=False))
    for tokens, i in zip(got, order, strict=True):
        assert_same_tokens(tokens, *expected[i])


@pytest.mark.parametrize(("page_size", "chunk"), [(4, 7), (16, 6), (8, 8)])
def test_edges_of_chunks_and_pages(make_llm, dense, page_size, chunk):
    """Lengths at page and chunk edges, page size not dividing the chunk, chunk under a page."""
    llm = make_llm(page_size=page_size, prefill_chunk=chunk, num_pages=8 * 128 // page_size + 1)
    p, c = page_size, chunk
    lengths = sorted({1, 2, p - 1, p, p + 1, c - 1, c, c + 1, 2 * c, 2 * c + 1})
    prompts = random_prompts(lengths, seed=2)
    want = [dense(prompt, p + 1) for prompt in prompts]
    for max_tokens in (1, 2, p + 1):
        got = ids(llm.generate(prompts, greedy(max_tokens), use_tqdm=False))
        for tokens, (full, gaps) in zip(got, want, strict=True):
            assert len(tokens) == max_tokens
            assert_same_tokens(tokens, full[:max_tokens], gaps)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_unwritten_is_read(make_llm, expected, poison):
    """Every page poisoned first, the null page too."""
    llm = make_llm(page_size=4, prefill_chunk=7, num_pages=8 * 128 // 4 + 1)
    llm.engine.reset_prefix_cache()  # what its pages hold is about to be lost
    llm.engine.runner.fill_pool(poison)
    got = ids(llm.generate(random_prompts(LENGTHS), greedy(12), use_tqdm=False))
    for tokens, (want, gaps) in zip(got, expected, strict=True):
        assert_same_tokens(tokens, want, gaps)
    llm.engine.reset_prefix_cache()
    llm.engine.runner.fill_pool(0.0)


def test_neighbours_do_not_change_seeded_or_greedy_rows(llm):
    """Whatever shares the batch, and whichever row a request has in it."""
    prompts = random_prompts((5, 9, 20, 3, 7))
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True)
    want = ids(llm.generate(prompts[0], seeded, use_tqdm=False))[0]
    solo_greedy = [ids(llm.generate(prompt, greedy(16), use_tqdm=False))[0] for prompt in prompts]
    others = [
        greedy(16),
        SamplingParams(temperature=1.3, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=1, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1, repetition_penalty=1.5, max_tokens=11, ignore_eos=True),
    ]
    for place in range(5):
        params = [*others[:place], seeded, *others[place:]]
        batch = [*prompts[1 : place + 1], prompts[0], *prompts[place + 1 :]]
        got = ids(llm.generate(batch, params, use_tqdm=False))
        assert got[place] == want
        # By neighbour: the greedy one first, the one of top_k 1 third.
        neighbours = [tokens for index, tokens in enumerate(got) if index != place]
        assert neighbours[0] == solo_greedy[1] and neighbours[2] == solo_greedy[3]
    top_one = SamplingParams(temperature=1.0, top_k=1, max_tokens=16, ignore_eos=True)
    assert ids(llm.generate(prompts[1], top_one, use_tqdm=False))[0] == solo_greedy[1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(llm, temperature):
    prompt = random_prompts((9,))[0]
    params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    assert ids(llm.generate(prompt, params, use_tqdm=False)) == ids(llm.generate(prompt, greedy(8), use_tqdm=False))


def test_top_k_beyond_the_vocabulary_is_off(llm):
    prompt = random_prompts((9,))[0]
    base = dict(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    want = ids(llm.generate(prompt, SamplingParams(**base), use_tqdm=False))
    for k in (-1, 0, llm.engine.limits.vocab_size, 10**7):
        assert ids(llm.generate(prompt, SamplingParams(top_k=k, **base), use_tqdm=False)) == want
