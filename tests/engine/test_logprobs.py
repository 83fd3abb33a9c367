"""Log-probabilities against the model itself: every mode gives, at every place, what one dense pass gives.

The reference is a causal pass over prompt and output without pages, chunks or batch, and a log-softmax in float64.
An engine adds in another order (per page, chunk and batch shape), which in float32 moves a logit by a few 1e-6;
`TOLERANCE` leaves room for that and for nothing else.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputs
from jaxserve.core import Submission
from jaxserve.server.logprobs import CompletionLogprobs, chat_logprobs
from jaxserve.testing.tiny import EOS_ID, write_tiny_model, write_tiny_tokenizer
from tests.engine.conftest import assert_idle_clean, greedy, random_prompts
from tests.engine.test_scheduling_neutrality import SCARCE
from tests.models.test_golden import dense_logits

TOLERANCE = 1e-4
SIZE = 128
"""Prompt and output are padded to it, so that the reference compiles once."""
TOP = 20


def reference(llm, tokens):
    """float64[len(tokens), V]: row t holds the log-probabilities of the token after t."""
    engine = llm.engine
    padded = jnp.asarray(tokens + [0] * (SIZE - len(tokens)), jnp.int32)
    logits = np.asarray(dense_logits(engine.model_config, engine.runner._params, padded), np.float64)[: len(tokens)]
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def check_entry(entry, token, logprobs, count):
    """An entry is the token and the `count` likeliest of `logprobs`, with their ranks."""
    assert next(iter(entry)) == token and entry[token].logprob == pytest.approx(logprobs[token], abs=TOLERANCE)
    assert np.sum(logprobs > logprobs[token] + TOLERANCE) < entry[token].rank
    assert entry[token].rank <= 1 + np.sum(logprobs > logprobs[token] - TOLERANCE)
    best = sorted(entry.values(), key=lambda item: item.rank)[:count]
    assert [item.rank for item in best] == list(range(1, count + 1))
    assert [item.logprob for item in best] == pytest.approx(np.sort(logprobs)[::-1][:count], abs=TOLERANCE)
    for other, item in entry.items():
        # Which of two within rounding comes first is open; what an id is said to have is not.
        assert item.logprob == pytest.approx(logprobs[other], abs=TOLERANCE)
    assert len(entry) in (count, count + 1)


def check(llm, output, params):
    """Every score of every choice, and of the prompt."""
    prompt = output.prompt_token_ids
    for choice in output.outputs:
        rows = reference(llm, prompt + choice.token_ids)
        assert len(choice.logprobs) == len(choice.token_ids)
        for at, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), len(prompt) - 1):
            check_entry(entry, token, rows[at], params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    for at, (token, entry) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
        check_entry(entry, token, rows[at], params.prompt_logprobs)


def run(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, asked in zip(outputs, params, strict=True):
        check(llm, output, asked)
    assert_idle_clean(llm)
    return outputs


LENGTHS = (1, 2, 15, 16, 17, 40, 64, 33)


def settings(kind, count=12, n=1):
    """One per prompt, with both kinds of scores and 0 to 20 alternatives."""
    made = []
    for index in range(len(LENGTHS)):
        scores = dict(logprobs=(0, 1, 5, TOP)[index % 4], prompt_logprobs=(TOP, 0, 3)[index % 3], n=n)
        if kind == "seeded":
            sampled = dict(temperature=0.9, top_p=0.95, seed=index, presence_penalty=0.3)
            made.append(SamplingParams(max_tokens=count, ignore_eos=True, **sampled, **scores))
        else:
            made.append(greedy(count, **scores))
    return made


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS, seed=21)


KINDS = pytest.mark.parametrize("kind", ["greedy", "seeded"])


@KINDS
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_they_do_not_depend_on_chunks(make_llm, prompts, kind, chunk):
    run(make_llm(prefill_chunk=chunk), prompts, settings(kind))


@KINDS
def test_a_warm_prefix_cache_leaves_them_as_they_are(make_llm, prompts, kind):
    llm = make_llm(num_pages=80)
    llm.engine.reset_prefix_cache()
    asked = settings(kind)
    cold = run(llm, prompts, asked)
    # Prompt scores need every position's hidden state, so a prompt that wants them is computed whole.
    warm = run(llm, prompts, asked)
    assert all(output.num_cached_tokens == 0 for output in warm)
    without = [SamplingParams(**{**vars_of(each), "prompt_logprobs": None}) for each in asked]
    cached = run(llm, prompts, without)
    assert [o.num_cached_tokens for o in cached] == [(length - 1) // 16 * 16 for length in LENGTHS]
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (cold, warm, cached)]
    assert tokens[0] == tokens[1] == tokens[2]


def vars_of(params):
    return {name: getattr(params, name) for name in params.__slots__}


@KINDS
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_get_them_once_and_right(make_llm, prompts, kind, preemption):
    llm = make_llm(**SCARCE, reservation="optimistic", preemption=preemption, enable_prefix_caching=True)
    before = llm.engine.scheduler.counters.preemptions
    outputs = run(llm, prompts, settings(kind, 32))
    assert llm.engine.scheduler.counters.preemptions > before, "nothing was preempted: the test shows nothing"
    alone = [llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(prompts, settings(kind, 32), strict=True)]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]


def test_a_prompt_of_several_choices_is_scored_once(make_llm):
    llm, (prompt,) = make_llm(enable_prefix_caching=True), random_prompts((40,))
    asked = SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1, prompt_logprobs=2)
    requests = llm.engine.make_requests(Submission(prompt, asked, "r"), 0.0)
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    (plain,) = llm.generate([prompt], replace(asked, prompt_logprobs=None), use_tqdm=False)
    hits = llm.engine.stats.cache_hits
    (scored,) = llm.generate([prompt], asked, use_tqdm=False)
    assert llm.engine.stats.cache_hits > hits, "the other choices take the prompt from the cache"
    assert scored.num_cached_tokens == 0 and [len(scored.prompt_logprobs), plain.prompt_logprobs] == [len(prompt), None]
    assert [c.token_ids for c in scored.outputs] == [c.token_ids for c in plain.outputs]


@KINDS
def test_every_choice_has_its_own_and_the_prompt_has_one_set(llm, prompts, kind):
    outputs = run(llm, prompts, settings(kind, n=3))
    if kind == "seeded":
        assert any(len({tuple(c.token_ids) for c in output.outputs}) > 1 for output in outputs)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_alone_or_with_one_token(llm, prompts, max_tokens):
    asked = [greedy(max_tokens, logprobs=5, prompt_logprobs=5)] * len(prompts)
    for output in run(llm, prompts, asked):
        assert len(output.outputs[0].token_ids) == max_tokens


RESTRICTED = {
    "grammar": dict(structured_outputs=StructuredOutputs(regex="[~%]{12}")),
    "choice": dict(structured_outputs=StructuredOutputs(choice=["~" * 12])),
    "allowed": dict(allowed_token_ids=(200, 201, 202)),
    "bad words": dict(bad_words=tuple("abcdefghijklmnopqrstuvwxyzABC%&$!~")),
    "bias": dict(logit_bias={65: 100.0, 66: -100.0, 67: 99.5}),
    "min_tokens": dict(min_tokens=12, logit_bias={EOS_ID: 100.0}),
    "penalties": dict(repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=-2.0),
    "filters": dict(top_k=1, min_p=1.0),
    "hot": dict(top_p=1.0),
}


@pytest.mark.parametrize("temperature", [0, 100.0, 0.002])
@pytest.mark.parametrize("name", RESTRICTED)
def test_they_are_the_models_own_whatever_restricts_the_choice(llm, name, temperature):
    fields = dict(max_tokens=12, temperature=temperature, seed=1, logprobs=TOP, prompt_logprobs=2) | RESTRICTED[name]
    (output,) = run(llm, random_prompts((9,), seed=4), [SamplingParams(**fields)])
    assert output.outputs[0].token_ids


def test_ids_beyond_the_tokenizers_vocabulary_have_them_and_no_text(tmp_path):
    """A model padded beyond its tokenizer, as many are: 20 alternatives of which some have no text."""
    path = write_tiny_model(tmp_path / "padded", vocab=300)
    write_tiny_tokenizer(path, vocab=264)
    shape = dict(max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16, num_pages=4)
    llm = LLM(str(path), dtype="float32", compile_cache="", **shape)
    last = 299
    asked = SamplingParams(max_tokens=2, temperature=0, logprobs=TOP, logit_bias={last: 100.0}, prompt_logprobs=0)
    (output,) = run(llm, [[65, 299, 298, 263]], [asked])
    (choice,) = output.outputs
    assert choice.token_ids == [last, last] and choice.text == ""
    tokenizer = llm.engine.tokenizer
    rendered = CompletionLogprobs(tokenizer, output.prompt_token_ids).add(choice.token_ids, choice.logprobs)
    assert rendered["tokens"] == ["", ""] and rendered["text_offset"] == [0, 0]
    content = chat_logprobs(tokenizer, choice.token_ids, choice.logprobs, TOP)["content"]
    for entry, scores in zip(content, choice.logprobs, strict=True):
        assert (entry["token"], entry["bytes"], entry["logprob"]) == ("", [], scores[last].logprob)
        assert len(entry["top_logprobs"]) == TOP
