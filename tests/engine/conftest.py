"""Engines on the tiny model, made once per setting and shared by the session."""

import random

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core import Submission, Terms

PRECISION_GAP = 1e-3
"""Solo's top-1/top-2 logit gap under which a differing token is excused (float32)."""


@pytest.fixture(scope="session")
def make_llm(tiny_model_dir):
    """`make_llm(**settings)`: an LLM on the tiny model in float32, few buckets, shared by settings."""
    made = {}

    def make(**settings):
        settings = (
            dict(
                dtype="float32",
                max_model_len=128,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                page_size=16,
                num_pages=66,
            )
            | settings
        )
        settings.setdefault("decode_buckets", (settings["max_num_seqs"],))
        settings.setdefault("prefill_buckets", (settings["max_num_batched_tokens"],))
        settings.setdefault("table_width_buckets", (settings["max_model_len"] // settings["page_size"],))
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = LLM(str(tiny_model_dir), compile_cache="", **settings)
        return made[key]

    yield make
    for llm in made.values():
        assert_idle_clean(llm)


@pytest.fixture(scope="session")
def llm(make_llm):
    """The default tiny engine."""
    return make_llm()


def assert_idle_clean(llm):
    """Nothing is live, and every page but the null page is free."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work and scheduler.idle
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pages_owned) == (0, 0, 0)
    assert scheduler.pages_free + scheduler.pages_cached == llm.engine.runner.scheduler_config.num_pages - 1
    scheduler.check_invariants()


def random_prompts(lengths, seed=0, vocab=256):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def random_submissions(random_params, eos, *, seed, prompt_seed, count=36):
    """Prompts of several lengths, some with common beginnings, each with settings of its own."""
    rng = random.Random(seed)
    prompts = random_prompts([rng.choice((1, 3, 9, 17, 33, 40, 60)) for _ in range(count)], seed=prompt_seed)
    for index in range(0, count, 3):
        prompts[index] = (prompts[1] * 40)[:24] + prompts[index]
    return [
        Submission(prompt, random_params(rng, eos), f"r{index}", Terms(priority=rng.randint(-2, 2)))
        for index, prompt in enumerate(prompts)
    ]


def run_alone(make_llm, submissions):
    """Every choice of each prompt when it runs alone, one step at a time."""
    llm = make_llm(overlap=False, enable_prefix_caching=False)
    return [llm.generate([each.prompt_token_ids], each.params, use_tqdm=False)[0] for each in submissions]


def greedy(max_tokens, **settings):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def ids(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def assert_same_tokens(got, want, gaps):
    """`got` equals `want`, up to a first mismatch where `gaps` (of `want`'s run) is tiny."""
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            assert gaps[position] < PRECISION_GAP, f"token {position} is {a}, not {b}; gap {gaps[position]}"
            return
