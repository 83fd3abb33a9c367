"""The tiny models against logits, greedy continuations and prompt scores computed elsewhere."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import forward, stack_layers, unembed
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from tests.models.tiny_models import NAMES, dense_attend, load

PAGE_SIZE = 4
SCANNED = (
    "llama_gqa_tied",
    "mistral_sliding",
    "gemma2_softcap",
    "gemma3_dual_rope",
    "gpt_oss_sinks",
    "qwen3_moe",
    "deepseek_v3_mla",
    "smollm3_nope",
)
"""A model of each kind of layers; of the others, stacked layers run over pages in slow tests only."""


@partial(jax.jit, static_argnums=0)
def dense_logits(config, params, ids):
    hidden, _ = forward(config, params, ids, jnp.arange(ids.shape[0]), dense_attend, None)
    return unembed(config, params, hidden)


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def logits(model):
    """float32[tokens, vocabulary] of the prompt and of the wanted tokens but the last.

    Causal: one pass gives the choice at every step, right as long as all are.
    """
    config, params, golden = model
    return dense_logits(config, params, jnp.asarray(golden["prompt_ids"] + golden["greedy_ids"][:-1], jnp.int32))


def test_logits_are_the_golden_ones(model, logits):
    golden = model[2]
    np.testing.assert_allclose(logits[len(golden["prompt_ids"]) - 1], golden["logits_last"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(logits[20], golden["logits_position_20"], rtol=0, atol=1e-3)


def test_stacked_layers_give_the_golden_logits(model):
    config, params, golden = model
    logits = dense_logits(config, stack_layers(params), jnp.asarray(golden["prompt_ids"], jnp.int32))
    np.testing.assert_allclose(logits[-1], golden["logits_last"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(logits[20], golden["logits_position_20"], rtol=0, atol=1e-3)


def test_logits_in_bfloat16_are_near_the_golden_ones(model):
    config, params, golden = model
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = dense_logits(config, params, jnp.asarray(golden["prompt_ids"], jnp.int32))
    spread = np.std(golden["logits_last"])
    # A token that is nearly undecided between experts may get another one from rounded numbers.
    share = 0.15 if config.experts is None else 0.3
    assert np.abs(logits[-1] - np.asarray(golden["logits_last"])).max() < share * spread


def test_prompt_logprobs_are_the_golden_ones(model, logits):
    golden = model[2]
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)
    logprobs = jax.nn.log_softmax(logits)
    assert golden["logprobs_of_prompt"][0] is None
    of_next = logprobs[jnp.arange(ids.size - 1), ids[1:]]
    np.testing.assert_allclose(of_next, golden["logprobs_of_prompt"][1:], rtol=0, atol=2e-3)


def test_greedy_continuation_is_the_golden_one(model, logits):
    golden = model[2]
    assert logits[len(golden["prompt_ids"]) - 1 :].argmax(axis=-1).tolist() == golden["greedy_ids"]


def test_prefill_and_decode_over_pages_give_the_golden_continuation(model):
    config, params, golden = model
    continue_over_pages(config, params, golden)


@pytest.mark.parametrize(
    "name",
    [name if name in SCANNED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_stacked_layers_give_the_golden_continuation_over_pages(name):
    config, params, golden = load(name)
    continue_over_pages(config, stack_layers(params), golden)


def continue_over_pages(config, params, golden):
    """Prefill and decode over shuffled pages that hold NaN; asserts that the tokens are the golden ones."""
    prompt, wanted = golden["prompt_ids"], golden["greedy_ids"]
    width = -(-(len(prompt) + len(wanted)) // PAGE_SIZE)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(width), jnp.int32)[None]
    parts = 2 if config.value_dim is None else 1
    shape = (config.num_layers, width + 1, parts, config.num_kv_heads, PAGE_SIZE, config.head_dim)

    @partial(jax.jit, donate_argnums=1)
    def step(params, pool, ids, positions):
        pages = table[0, positions // PAGE_SIZE]
        starts = None if ids.shape[0] == 1 else jnp.asarray([0, ids.shape[0]], jnp.int32)
        context = positions[-1:] + 1

        def attend(layer, q, k, v, pool, options):
            pool = write_kv(pool, layer, k, v, pages, positions % PAGE_SIZE, value_dim=options.value_dim)
            return paged_attention(q, pool, layer, table, context, starts, **options._asdict()), pool

        hidden, pool = forward(config, params, ids, positions, attend, pool)
        return unembed(config, params, hidden[-1:])[0].argmax(), pool

    pool = jnp.full(shape, jnp.nan)
    token, pool = step(params, pool, jnp.asarray(prompt, jnp.int32), jnp.arange(len(prompt), dtype=jnp.int32))
    found = [int(token)]
    while len(found) < len(wanted):
        position = jnp.asarray([len(prompt) + len(found) - 1], jnp.int32)
        token, pool = step(params, pool, jnp.asarray(found[-1:], jnp.int32), position)
        found.append(int(token))
    assert found == wanted
