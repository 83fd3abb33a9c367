"""The engine on real steps: stopping, limits, utilisation, log-probabilities, aborts."""

import json

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.core import RejectedError, Request
from jaxserve.runtime import COMPILES
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts


def one(llm, prompt, params):
    return llm.generate([prompt], params, use_tqdm=False)[0]


# Stopping ---------------------------------------------------------------------------------------


def test_min_tokens_holds_off_every_eos_exactly_that_long(llm):
    """EOS is the 5th sampled token with min_tokens 4, whichever EOS id it is."""
    prompt = random_prompts((50,))[0]
    assert len(llm.engine.limits.eos_token_ids) > 1
    for eos in llm.engine.limits.eos_token_ids:
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=4, logit_bias={eos: 100.0})
        output = one(llm, prompt, params).outputs[0]
        assert len(output.token_ids) == 5 and output.token_ids[-1] == eos
        assert not set(output.token_ids[:4]) & set(llm.engine.limits.eos_token_ids)
        assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_stop_id_ends_the_output_and_is_named(llm):
    prompt = random_prompts((9,))[0]
    base = one(llm, prompt, greedy(12)).outputs[0]
    stop = base.token_ids[5]
    output = one(llm, prompt, greedy(12, stop_token_ids=(stop,))).outputs[0]
    assert output.token_ids == base.token_ids[: base.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert base.text.startswith(output.text)


def test_eos_is_an_ordinary_token_when_ignored(llm):
    eos = llm.engine.limits.eos_token_ids[0]
    prompt = random_prompts((9,))[0]
    output = one(llm, prompt, greedy(6, logit_bias={eos: 100.0})).outputs[0]
    assert output.token_ids == [eos] * 6 and output.finish_reason == "length"


def test_a_stop_string_cuts_the_text_at_its_first_occurrence(llm):
    prompt = random_prompts((9,))[0]
    base = one(llm, prompt, greedy(40)).outputs[0]
    stop = base.text[7:10]
    cut = base.text.index(stop)
    output = one(llm, prompt, greedy(40, stop=(stop,))).outputs[0]
    assert output.text == base.text[:cut]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = one(llm, prompt, greedy(40, stop=(stop,), include_stop_str_in_output=True)).outputs[0]
    assert kept.text == base.text[: cut + len(stop)]
    assert_idle_clean(llm)


def test_a_stop_string_begun_before_min_tokens_is_not_seen(llm):
    """It counts from where it begins: on the last token held off it is not seen, on the next it is."""
    letters = range(97, 123)
    params = {"allowed_token_ids": tuple(letters), "presence_penalty": 2.0, "repetition_penalty": 100.0}
    base = one(llm, random_prompts((9,))[0], greedy(20, **params)).outputs[0]
    assert len(set(base.text)) == 20, "every letter comes once"
    for begin, seen in ((0, False), (9, False), (10, True)):
        stop = base.text[begin : begin + 3]
        output = one(llm, random_prompts((9,))[0], greedy(20, stop=(stop,), min_tokens=10, **params)).outputs[0]
        assert output.text == (base.text[:begin] if seen else base.text)
        assert (output.finish_reason, output.stop_reason) == (("stop", stop) if seen else ("length", None))


# Lengths ----------------------------------------------------------------------------------------


def test_lengths_around_the_context(llm):
    """One below the limit, at it and above it, for the prompt and for prompt + max_tokens; M is 128."""
    limit = llm.engine.max_model_len
    for length, granted in ((limit - 1, 1), (limit - 3, 3)):
        output = one(llm, random_prompts((length,))[0], greedy(None)).outputs[0]
        assert len(output.token_ids) == granted and output.finish_reason == "length"
    with pytest.raises(ValueError, match=f"prompt has {limit} tokens; the limit is {limit}"):
        one(llm, [1] * limit, greedy(1))
    with pytest.raises(ValueError, match=f"prompt has {limit + 1} tokens; the limit is {limit}"):
        one(llm, [1] * (limit + 1), greedy(0))
    with pytest.raises(ValueError, match=f"prompt has {limit - 4} tokens and max_tokens is 5"):
        one(llm, [1] * (limit - 4), greedy(5))
    assert_idle_clean(llm)


def test_max_tokens_zero_only_scores_the_prompt_up_to_the_whole_context(llm):
    prompt = random_prompts((llm.engine.max_model_len,))[0]
    output = one(llm, prompt, greedy(0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    assert all(list(entry) == [token] for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True))


@pytest.mark.parametrize("bad", [[-1], [2**31], [10**6], [1.5], [True], ["1"]])
def test_bad_prompt_ids_are_refused_by_name(llm, bad):
    with pytest.raises(ValueError, match=r"prompt (has id|must be integers)"):
        one(llm, [1, *bad], greedy(1))


def test_bad_bias_ids_are_refused(llm):
    vocab = llm.engine.limits.vocab_size
    with pytest.raises(ValueError, match=f"logit_bias has id {vocab}"):
        one(llm, [1], SamplingParams(logit_bias={vocab: 1.0}))
    with pytest.raises(ValueError, match="logit_bias token id is -1"):
        SamplingParams(logit_bias={-1: 1.0})


def test_a_prompt_that_the_pool_cannot_hold_is_refused_at_once(make_llm):
    """The pool holds 48 tokens, the context is 128; the small one behind is served."""
    llm = make_llm(num_pages=4, max_num_seqs=2)
    with pytest.raises(ValueError, match="pages"):
        llm.generate([random_prompts((60,))[0], [1, 2, 3]], greedy(4), use_tqdm=False)
    assert len(one(llm, [1, 2, 3], greedy(4)).outputs[0].token_ids) == 4


# Log-probabilities ------------------------------------------------------------------------------


def test_prompt_logprobs_do_not_depend_on_chunks(make_llm, llm):
    prompt = random_prompts((40,))[0]
    whole = one(llm, prompt, greedy(2, prompt_logprobs=3)).prompt_logprobs
    chunked = one(make_llm(prefill_chunk=7), prompt, greedy(2, prompt_logprobs=3)).prompt_logprobs
    assert len(whole) == len(chunked) == 40 and whole[0] is chunked[0] is None
    for a, b, token in zip(whole[1:], chunked[1:], prompt[1:], strict=True):
        assert abs(a[token].logprob - b[token].logprob) < 1e-4
        assert len(a) in (3, 4)


def test_prompt_logprobs_are_the_chances_of_each_next_token(llm):
    """Entry t is what a request for the prefix before t gives for token t."""
    prompt = random_prompts((12,))[0]
    scores = one(llm, prompt, greedy(1, prompt_logprobs=0)).prompt_logprobs
    vocab = min(20, llm.engine.limits.vocab_size)
    for t in (1, 5, 11):
        first = one(llm, prompt[:t], greedy(1, logprobs=vocab, logit_bias={prompt[t]: 100.0})).outputs[0]
        assert first.token_ids == [prompt[t]]
        assert abs(first.logprobs[0][prompt[t]].logprob - scores[t][prompt[t]].logprob) < 1e-4


def test_logprobs_hold_the_chosen_token_and_the_likeliest(llm):
    output = one(llm, random_prompts((9,))[0], greedy(5, logprobs=4)).outputs[0]
    assert len(output.logprobs) == 5
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        values = [entry[t].logprob for t in entry]
        assert len(entry) == 4 and next(iter(entry)) == token and entry[token].rank == 1
        assert values == sorted(values, reverse=True) and all(v <= 0 for v in values)


def test_zero_logprobs_means_the_chosen_token_only(llm):
    output = one(llm, random_prompts((9,))[0], greedy(3, logprobs=0)).outputs[0]
    assert [list(entry) for entry in output.logprobs] == [[t] for t in output.token_ids]


# Batches ----------------------------------------------------------------------------------------


def test_mixed_requests_through_few_slots_leave_nothing_behind(llm):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 64)
    wanted = rng.integers(1, 30, 64)
    params = [greedy(int(n)) for n in wanted]
    before = llm.engine.stats.iterations, llm.engine.stats.slot_steps
    outputs = llm.generate(random_prompts(lengths), params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == wanted.tolist()
    assert_idle_clean(llm)
    iterations = llm.engine.stats.iterations - before[0]
    utilisation = (llm.engine.stats.slot_steps - before[1]) / (iterations * 8)
    assert 0.5 < utilisation <= 1.0


def test_choices_differ_and_repeat(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    prompt = random_prompts((9,))[0]
    first, again = (one(llm, prompt, params) for _ in range(2))
    tokens = [o.token_ids for o in first.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in tokens}) > 1
    assert tokens == [o.token_ids for o in again.outputs]
    single = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    assert one(llm, prompt, single).outputs[0].token_ids == tokens[0]


def test_nothing_compiles_after_warm_up(make_llm):
    """Whatever the batch, length, log-probabilities, penalties, seeds, n, bias, stops."""
    llm = make_llm(decode_buckets=(2, 8), prefill_buckets=(16, 64), table_width_buckets=(2, 8))
    before = COMPILES.count
    rng = np.random.default_rng(3)
    settings = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "seed": 2**63 - 1},
        {"temperature": 0.9, "n": 3, "seed": -1},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}, "min_tokens": 2, "stop_token_ids": (7,)},
        {"logprobs": 5, "prompt_logprobs": 2},
        {"stop": ("abc",)},
    ]
    for size in (1, 2, 3, 8, 11):
        prompts = random_prompts(rng.integers(1, 100, size), seed=size)
        params = [
            SamplingParams(**({"temperature": 0, "max_tokens": 6} | settings[(i + size) % len(settings)]))
            for i in range(size)
        ]
        llm.generate(prompts, params, use_tqdm=False)
    for setting in settings:
        one(llm, [1, 2, 3], SamplingParams(**({"temperature": 0, "max_tokens": 6} | setting)))
    assert COMPILES.count == before
    assert_idle_clean(llm)


def test_a_full_queue_refuses_with_a_reason_and_what_ran_goes_on(make_llm):
    llm = make_llm(max_num_seqs=2, max_queue_requests=3)
    deltas = {}
    accepted = []
    for i in range(10):
        request = Request(f"r{i}", (1, 2, 3), greedy(5), max_tokens=5)
        try:
            llm.engine.add(request, 0, deltas.setdefault(request.request_id, []).append)
            accepted.append(request.request_id)
        except RejectedError as error:
            assert error.rejection.reason == "queue_full_requests"
            assert error.rejection.retry_after_s > 0
    assert accepted == [f"r{i}" for i in range(5)]
    while llm.engine.has_work:
        llm.engine.step()
    for request_id in accepted:
        assert sum(len(d.token_ids) for d in deltas[request_id]) == 5
        assert deltas[request_id][-1].finish_reason == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8])
def test_an_abort_at_any_stage_leaves_the_others_alone(make_llm, steps):
    """Queued, mid-chunk, decoding; twice."""
    llm = make_llm(prefill_chunk=7, max_num_seqs=2)
    prompts = random_prompts((9, 30, 5, 12))
    want = ids(llm.generate(prompts, greedy(10), use_tqdm=False))
    deltas = {i: [] for i in range(4)}
    for i, prompt in enumerate(prompts):
        llm.engine.add(Request(f"r{i}", tuple(prompt), greedy(10), max_tokens=10), 0, deltas[i].append)
    for _ in range(steps):
        llm.engine.step()
    assert llm.engine.abort("r1") and not llm.engine.abort("r1")
    assert llm.engine.abort("r3") and not llm.engine.abort("unknown")
    while llm.engine.has_work:
        llm.engine.step()
    for i in (0, 2):
        assert [t for d in deltas[i] for t in d.token_ids] == want[i]
    assert [deltas[i][-1].finish_reason for i in (1, 3)] == ["abort", "abort"]
    assert_idle_clean(llm)


def test_the_trace_tells_slot_utilisation_of_the_textbook_example(make_llm, tmp_path):
    """One request of 90 tokens, seven of 4, then a backlog of 4s: slots refill, static batches wait."""
    llm = make_llm(trace_file=str(tmp_path / "trace.jsonl"))
    lengths = [90] + [4] * 7 + [4] * 140
    llm.generate([[1, 2, 3]] * len(lengths), [greedy(n) for n in lengths], use_tqdm=False)
    llm.engine.close()
    header, *records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert header["model"] == llm.engine.model_name
    busy = [len(r["decode"]) + len(r["prefill"]) for r in records]
    full = [b for r, b in zip(records, busy, strict=True) if r["queue"]]
    assert np.mean(full) / 8 > 0.95
    static = (90 + 7 * 4) / (8 * 90)
    assert np.mean(busy) / 8 > 4 * static
    assert records[-1]["pages_owned"] == 0


def test_the_same_seedless_request_twice_draws_anew(llm):
    params = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    prompt = random_prompts((9,))[0]
    assert one(llm, prompt, params).outputs[0].token_ids != one(llm, prompt, params).outputs[0].token_ids


def test_an_engine_seed_repeats_what_is_drawn(make_llm):
    params = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    first, second = (make_llm(seed=5, max_queue_requests=limit) for limit in (100, 101))
    drawn = [[one(llm, [1], params).outputs[0].token_ids for _ in range(2)] for llm in (first, second)]
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_an_unknown_setting_is_refused_by_name():
    from jaxserve import LLM

    with pytest.raises(ValueError, match="pagesize"):
        LLM("smollm2-135m", pagesize=3)


def test_chat_puts_tools_into_the_prompt(make_llm, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ tools[0].function.name if tools }}:{{ messages[0].content }}")
    llm = make_llm(chat_template=str(file))
    tools = [{"type": "function", "function": {"name": "now"}}]
    params = SamplingParams(max_tokens=1)
    (with_tools,) = llm.chat([{"role": "user", "content": "hi"}], params, tools=tools, use_tqdm=False)
    (without,) = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)
    assert (bytes(with_tools.prompt_token_ids), bytes(without.prompt_token_ids)) == (b"now:hi", b":hi")
