"""int8 and fp8 KV pages: rounded numbers, and otherwise an engine like any other."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.runtime import make_mesh
from jaxserve.runtime.kv_pool import PoolLayout
from tests.engine.conftest import greedy, ids, random_prompts

LENGTHS = (1, 5, 16, 17, 33, 60)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_batched_equals_alone(make_llm, dtype):
    """A token is rounded by itself, so its neighbours do not matter. Pages begin as NaN."""
    prompts = random_prompts(LENGTHS)
    llm = make_llm(kv_cache_dtype=dtype)
    llm.engine.reset_prefix_cache()
    llm.engine.runner.fill_pool(float("nan"))
    alone = [ids(llm.generate([prompt], greedy(12), use_tqdm=False))[0] for prompt in prompts]
    llm.engine.reset_prefix_cache()
    assert ids(llm.generate(prompts, greedy(12), use_tqdm=False)) == alone


def test_chunks_and_pages_do_not_matter(make_llm):
    prompts = random_prompts(LENGTHS)
    whole = ids(make_llm(kv_cache_dtype="int8").generate(prompts, greedy(12), use_tqdm=False))
    chunked = make_llm(kv_cache_dtype="int8", page_size=4, prefill_chunk=7, num_pages=8 * 128 // 4 + 1)
    chunked.engine.runner.fill_pool(float("nan"))
    assert ids(chunked.generate(prompts, greedy(12), use_tqdm=False)) == whole


def test_rounding_moves_logprobs_as_much_as_its_bits_explain(make_llm):
    """Root mean square over that of the logprobs' spread: steps of 2**-8, of 1/127 of the largest, of 2**-3."""
    prompt = random_prompts((60,))[0]
    scores = {}
    for dtype in ("auto", "bfloat16", "int8", "fp8"):
        llm = make_llm(kv_cache_dtype=dtype)
        llm.engine.reset_prefix_cache()
        output = llm.generate([prompt], greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
        scores[dtype] = np.asarray([e[t].logprob for e, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])
    exact = scores.pop("auto")
    moved = [np.std(rounded - exact) / np.std(exact) for rounded in scores.values()]
    assert 1e-6 < moved[0] < moved[1] < moved[2], moved
    assert (np.asarray(moved) < (0.01, 0.03, 0.15)).all(), moved


def test_swapped_pages_come_back_with_their_scales(make_llm):
    settings = dict(kv_cache_dtype="int8", page_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    prompts = random_prompts((3, 30))
    roomy = make_llm(num_pages=33, **settings)
    want = ids(roomy.generate(prompts, greedy(24), use_tqdm=False))
    tight = make_llm(num_pages=17, reservation="optimistic", preemption="swap", **settings)
    assert ids(tight.generate(prompts, greedy(24), use_tqdm=False)) == want
    assert tight.engine.scheduler.counters.swapped_pages > 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_pages_are_a_third_of_float32(make_llm, dtype):
    """Heads of 16 numbers: 16 bytes and a scale of 4 in place of 64."""
    llm, wide = make_llm(kv_cache_dtype=dtype), make_llm()
    runner = llm.engine.runner
    assert runner.page_bytes * 64 == wide.engine.runner.page_bytes * 20
    assert runner.memory_plan.kv_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._pool))


@pytest.mark.parametrize(
    ("head_dim", "implementation", "form"),
    [
        (64, "mosaic_tpu", (1, 128)),
        (96, "mosaic_tpu", (2, 128)),
        (128, "mosaic_tpu", (2, 128)),
        (64, "mosaic_gpu", (2, 64)),
        (64, "cpu", (2, 64)),
    ],
)
def test_the_pool_has_the_form_that_its_kernel_takes(make_llm, head_dim, implementation, form):
    config = dataclasses.replace(make_llm().engine.runner._model_config, head_dim=head_dim)
    kv = PoolLayout(config, make_mesh(1), 16, "bfloat16", implementation)
    shape = kv.abstract(5).pages.shape
    assert (shape[2], shape[5]) == form
    assert kv.page_bytes * 5 == kv.bytes_on_a_device(5) == 5 * 2 * shape[2] * shape[3] * 16 * shape[5] * 2
