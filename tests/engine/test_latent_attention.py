"""A model with latent attention in the engine: what its pages hold, and that they go wherever pages go."""

import jax
import numpy as np
import pytest

from jaxserve import LLM
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.models.tiny_models import FOLDER

MODEL = FOLDER / "deepseek_v3_mla"
ROW = 16 + 8
"""Numbers of a latent and the shared key part."""
LAYERS = 3


def make(**settings):
    settings = (
        dict(
            dtype="float32",
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            page_size=4,
            num_pages=33,
            decode_buckets=(2,),
            prefill_buckets=(16,),
            table_width_buckets=(16,),
        )
        | settings
    )
    return LLM(str(MODEL), skip_tokenizer_init=True, compile_cache="", **settings)


@pytest.fixture(scope="module")
def roomy():
    return make()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts((3, 30))


@pytest.fixture(scope="module")
def wanted(roomy, prompts):
    return ids(roomy.generate(prompts, greedy(24), use_tqdm=False))


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"),
    [("float32", ROW * 4), ("bfloat16", ROW * 2), ("int8", ROW + 2 * 4)],
)
def test_a_token_takes_the_bytes_of_its_latent(roomy, dtype, bytes_per_token):
    """And of 8-bit pages two scales, of the latent and of the key part."""
    runner = roomy.engine.runner if dtype == "float32" else make(kv_cache_dtype=dtype, num_pages=17).engine.runner
    assert runner.page_bytes == LAYERS * 4 * bytes_per_token
    assert runner.memory_plan.kv_bytes == runner.memory_plan.num_pages * runner.page_bytes
    assert runner.memory_plan.kv_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._pool))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_requests_give_the_same_ids(prompts, wanted, preemption):
    tight = make(num_pages=17, reservation="optimistic", preemption=preemption)
    tight.engine.runner.fill_pool(float("nan"))
    assert ids(tight.generate(prompts, greedy(24), use_tqdm=False)) == wanted
    counters = tight.engine.scheduler.counters
    assert counters.preemptions > 0 and (counters.swapped_pages > 0) == (preemption == "swap")
    assert_idle_clean(tight)


def test_cached_prefixes_give_the_same_ids(roomy, prompts, wanted):
    roomy.engine.reset_prefix_cache()
    before = roomy.engine.scheduler.counters.cached_tokens
    for _ in range(2):
        assert ids(roomy.generate(prompts, greedy(24), use_tqdm=False)) == wanted
    assert roomy.engine.scheduler.counters.cached_tokens - before >= 28


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rounded_pages_stay_close(roomy, prompts, dtype):
    scores = []
    for llm in (roomy, make(kv_cache_dtype=dtype)):
        llm.engine.reset_prefix_cache()
        llm.engine.runner.fill_pool(float("nan"))
        output = llm.generate([prompts[1]], greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
        scores.append([e[t].logprob for e, t in zip(output.prompt_logprobs[1:], prompts[1][1:], strict=True)])
    moved = np.std(np.subtract(*scores)) / np.std(scores[0])
    assert 1e-5 < moved < {"int8": 0.03, "fp8": 0.4}[dtype]  # a token whose rounded score chooses another expert jumps


@pytest.mark.parametrize("name", ["native_cpu", "mosaic_gpu", "mosaic_tpu"])
def test_attention_that_lacks_latents_is_refused_before_anything_is_compiled(name):
    with pytest.raises(ValueError, match=f"attention_implementation is {name}: .*choose auto, reference, cpu"):
        make(attention_implementation=name)


def test_layers_in_one_call_are_refused_and_auto_does_without():
    with pytest.raises(ValueError, match="decoder_implementation native_cpu: attention is by cpu"):
        make(decoder_implementation="native_cpu")
