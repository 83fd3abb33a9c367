"""SMP-6 and LGP-3: penalties predicted by hand, prompt scores against requests of one token."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core import SamplingParams
from tests.engine.conftest import greedy, ids, random_prompts
from tests.models.test_golden import dense_logits

LENGTH = 48
"""Prompt and output of every case are padded to it, so that the reference compiles once."""


def reference_logits(llm, tokens):
    """float64[len(tokens), V] of the model without engine, pages or batch."""
    engine = llm.engine
    padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)), jnp.int32)
    return np.asarray(dense_logits(engine.model_config, engine.runner._params, padded), np.float64)[: len(tokens)]


def predicted(logits, prompt, output, params):
    """Logits after the penalties, written out: repetition over prompt and output, the others over output."""
    x = logits.copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.4},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 1.1},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    ],
)
def test_smp_6_penalties_count_prompt_and_output_where_they_should(llm, penalties):
    # The prompt holds token a three times, a being what the model likes best after it.
    base = random_prompts((12,), seed=6)[0]
    a = int(reference_logits(llm, base)[-1].argmax())
    prompt = [a, *base[:6], a, *base[6:], a]
    params = greedy(24, **penalties)
    output = ids(llm.generate(prompt, params, use_tqdm=False))[0]
    logits = reference_logits(llm, prompt + output[:-1])
    for step, token in enumerate(output):
        x = predicted(logits[len(prompt) - 1 + step], prompt, output[:step], params)
        # Where two tokens are within rounding of each other either is right.
        assert x[token] >= x.max() - 1e-3, f"step {step}: {token} instead of {x.argmax()}"
    if "repetition_penalty" in penalties:
        # The prompt's own tokens are what the model likes: that they were counted shows.
        assert output != ids(llm.generate(prompt, greedy(24), use_tqdm=False))[0]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_lgp_3_prompt_scores_stand_at_their_tokens_across_chunks(make_llm, length):
    llm = make_llm(prefill_chunk=16)
    prompt = random_prompts((length,), seed=3)[0]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate(prompt, asked, use_tqdm=False)[0].prompt_logprobs
    assert len(scores) == length and scores[0] is None
    # A request of one token on each prefix, which may only be the prompt's next one.
    prefixes = [prompt[:at] for at in range(1, length)]
    one = [SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(prompt[at],)) for at in range(1, length)]
    outputs = llm.generate(prefixes, one, use_tqdm=False) if prefixes else []
    for at, output in enumerate(outputs, 1):
        (choice,) = output.outputs
        assert choice.token_ids == [prompt[at]] and list(scores[at]) == [prompt[at]]
        assert abs(scores[at][prompt[at]].logprob - choice.logprobs[0][prompt[at]].logprob) < 1e-4, at
