"""Several decode steps in one dispatch bring what single steps bring: the real engine, random lives."""

import pytest

from jaxserve import SamplingParams
from jaxserve.core import StructuredOutputs, Submission
from jaxserve.runtime import COMPILES
from jaxserve.tables.layout import MAX_STOP_IDS
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts, random_submissions, run_alone
from tests.engine.test_overlap import MODES, Lives, assert_as_alone
from tests.engine.test_trace_replay import replayed

STEPS = {"max_decode_steps": 7, "max_arrival_delay_s": 1e6}
NUM_LIVES = 4


class SparseLives(Lives):
    """Fewer at once, with pauses between them, so that often nobody waits."""

    arrivals = (0, 0, 0, 0, 0, 1, 3)


def random_params(rng, eos):
    """Settings of a request: most run freely, each kind with an end, or an edit of its logits, of its own."""
    free = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0.9, "top_p": 0.9, "ignore_eos": True},
        {"temperature": 1.2, "logit_bias": {eos: 9.0}},  # ends by EOS, sooner or later
        {"temperature": 1.2, "logit_bias": {eos: 9.0}, "min_tokens": 5},
        {"temperature": 1.0, "stop_token_ids": tuple(range(97, 97 + MAX_STOP_IDS - 2)), "min_tokens": 3},
        {"temperature": 1.0, "stop_token_ids": tuple(range(97, 97 + MAX_STOP_IDS)), "ignore_eos": True},
        {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.05, "bad_words": ("a", "e"), "ignore_eos": True},
        {"temperature": 0, "prompt_logprobs": 2, "ignore_eos": True},
        {"temperature": 1.0, "n": 3, "ignore_eos": True, "stop_token_ids": (101, 113)},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(60, 120)), "ignore_eos": True},
    ]
    bound = [
        {"temperature": 0, "stop": ("e", "qu"), "ignore_eos": True},
        {"temperature": 1.0, "stop_token_ids": tuple(range(97, 98 + MAX_STOP_IDS)), "ignore_eos": True},
        {"temperature": 1.5, "structured_outputs": StructuredOutputs(regex="[a-z]{2,9}[0-9]")},
        {"temperature": 1.0, "bad_words": ("ab", "th", "ing"), "ignore_eos": True},
        {"temperature": 0.9, "ignore_eos": True, "logprobs": 3},
    ]
    settings = rng.choice(free if rng.random() < 0.85 else bound)
    lengths = [length for length in (1, 2, 3, 9, 20, 28) if length >= settings.get("min_tokens", 0)]
    return SamplingParams(seed=rng.randrange(2**31), max_tokens=rng.choice(lengths), **settings)


@pytest.fixture(scope="module")
def submissions(make_llm):
    eos = make_llm(overlap=False).engine.limits.eos_token_ids[0]
    return random_submissions(random_params, eos, seed=6, prompt_seed=7)


@pytest.fixture(scope="module")
def alone(make_llm, submissions):
    return run_alone(make_llm, submissions)


def several_in(plans):
    return [plan for plan in plans if plan.num_steps > 1]


@pytest.fixture
def watch(monkeypatch):
    """`watch(engine)`: a list that gets every plan the engine dispatches from now on."""

    def begin(engine):
        plans, dispatch = [], engine.runner.dispatch
        monkeypatch.setattr(
            engine.runner, "dispatch", lambda prepared: (plans.append(prepared.plan), dispatch(prepared))[1]
        )
        return plans

    return begin


@pytest.mark.parametrize(
    ("mode", "overlap"), [("recompute", True), ("recompute", False), ("swap", True), ("pause", True), ("pause", False)]
)
def test_random_lives_get_what_they_get_alone_in_single_steps(make_llm, submissions, alone, watch, mode, overlap):
    llm = make_llm(**MODES[mode], **STEPS, overlap=overlap)
    engine = llm.engine
    engine.reset_prefix_cache()
    engine.runner.fill_pool(float("nan"))
    plans, compiles, counters = watch(engine), COMPILES.count, engine.scheduler.counters
    preemptions, num_aborted = counters.preemptions, 0
    for seed in range(NUM_LIVES):
        lives = SparseLives(engine, submissions, seed)
        lives.run()
        assert_as_alone(lives, alone)
        num_aborted += len(lives.aborted)
    assert num_aborted, "nothing was aborted: the test shows less"
    assert counters.preemptions > preemptions, "nothing was preempted: the test shows less"
    assert len(several_in(plans)) > 20, "hardly anything had several steps: the test shows less"
    assert COMPILES.count == compiles
    assert engine.stats.steps > engine.stats.iterations
    assert_idle_clean(llm)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_run_of_several_steps_replays_to_the_byte(make_llm, submissions, watch, tmp_path, overlap):
    path = tmp_path / "trace.jsonl"
    engine = make_llm(**MODES["recompute"], **STEPS, overlap=overlap, trace_file=str(path)).engine
    plans = watch(engine)
    for seed in (0, 1):
        lives = SparseLives(engine, submissions, seed)
        lives.run()
    engine.close()
    records = replayed(path)
    steps = [record.decode_steps for record in records if hasattr(record, "decode_steps")]
    assert steps == [plan.num_steps for plan in plans] and several_in(plans)
    assert engine.scheduler.counters.preemptions and lives.aborted


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ids_min_tokens_and_lengths_end_rows_of_one_dispatch_apart(make_llm, watch, overlap):
    single, llm = make_llm(overlap=False), make_llm(**STEPS, overlap=overlap)
    plans = watch(llm.engine)
    eos = llm.engine.limits.eos_token_ids[0]
    prompts = random_prompts((5, 9, 17, 30), seed=3)
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, stop_token_ids=tuple(range(97, 100))),
        SamplingParams(temperature=0, max_tokens=40, logit_bias={eos: 100.0}, min_tokens=11),
        greedy(9),
        greedy(33),
    ]
    want = single.generate(prompts, params, use_tqdm=False)
    for _ in range(3):
        got = llm.generate(prompts, params, use_tqdm=False)
        assert ids(got) == ids(want)
        for one, other in zip(got, want, strict=True):
            assert one.outputs[0].text == other.outputs[0].text
            assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
            assert one.outputs[0].stop_reason == other.outputs[0].stop_reason
    assert [len(each) for each in ids(want)][1:] == [12, 9, 33]
    assert any(len(set(plan.decode.num_steps)) > 1 for plan in plans), "no row ended within a dispatch"
    assert_idle_clean(llm)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_plan_after_an_arrival_has_its_prompt_and_one_step(make_llm, watch, overlap):
    engine = make_llm(**STEPS, overlap=overlap).engine
    plans = watch(engine)

    def add(name, prompt, max_tokens):
        for request in engine.make_requests(Submission(prompt, greedy(max_tokens), name), 0.0):
            engine.add(request, 0, lambda delta: None)

    add("a", [1, 2, 3], 100)
    while not several_in(plans):
        engine.step()
    add("b", [4, 5, 6], 3)
    engine.step()
    assert plans[-1].num_steps == 1 and [chunk.request_id for chunk in plans[-1].prefill] == ["b"]
    while engine.has_work:
        engine.step()


def test_tokens_of_one_dispatch_come_as_one_delta_and_gaps_say_so(make_llm, watch):
    llm = make_llm(**STEPS, overlap=False)
    engine, deltas = llm.engine, []
    engine.scheduler._step_time.observe(1, 0, 1e-3)
    plans = watch(engine)
    for request in engine.make_requests(Submission([1, 2, 3], greedy(30), "a"), 0.0):
        engine.add(request, 0, deltas.append)
    zeros = _observed(engine, "inter_token_latency_seconds_bucket", le="0.001")
    tokens = _observed(engine, "inter_token_latency_seconds_count")
    while engine.has_work:
        engine.step()
    sizes = [len(delta.token_ids) for delta in deltas]
    assert sum(sizes) == 30 and sizes == [1] + [plan.num_steps for plan in plans[1:]] and max(sizes) == 7
    assert (
        "".join(delta.text for delta in deltas)
        == llm.generate([[1, 2, 3]], greedy(30), use_tqdm=False)[0].outputs[0].text
    )
    assert _observed(engine, "inter_token_latency_seconds_count") - tokens >= 29
    together = sum(sizes) - len(sizes)
    assert _observed(engine, "inter_token_latency_seconds_bucket", le="0.001") - zeros >= together
    assert _observed(engine, "iteration_decode_steps_bucket", le="4.0") < _observed(
        engine, "iteration_decode_steps_bucket", le="8.0"
    )


def _observed(engine, name, **labels):
    labels = {"model_name": engine.model_name, "engine": "0"} | labels
    return engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels) or 0


def test_an_interrupted_run_of_several_steps_leaves_an_engine_that_goes_on(make_llm):
    llm = make_llm(**STEPS)
    prompts = random_prompts((9, 40, 17))
    want = ids(llm.generate(prompts, greedy(40), use_tqdm=False))
    deltas = []

    def interrupt(delta):
        deltas.append(delta)
        if len(deltas) == 3:
            raise KeyboardInterrupt

    for request in llm.engine.make_requests(Submission(prompts[0], greedy(40), "a"), 0.0):
        llm.engine.add(request, 0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(40), use_tqdm=False)
    assert ids(llm.generate(prompts, greedy(40), use_tqdm=False)) == want
    assert_idle_clean(llm)


@pytest.mark.parametrize(
    ("settings", "is_free"),
    [
        ({}, True),
        ({"stop_token_ids": tuple(range(MAX_STOP_IDS))}, True),
        ({"stop_token_ids": tuple(range(MAX_STOP_IDS)), "ignore_eos": False}, False),
        ({"stop": ("x",)}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 2}, True),
        ({"bad_words": ("a",)}, True),
        ({"bad_words": ("ab",)}, False),
        ({"structured_outputs": StructuredOutputs(regex="[a-z]+")}, False),
        ({"min_tokens": 3, "presence_penalty": 1.0, "logit_bias": {5: 1.0}, "seed": 3}, True),
    ],
)
def test_who_runs_freely(llm, settings, is_free):
    params = SamplingParams(**({"max_tokens": 9, "ignore_eos": True} | settings))
    (request,) = llm.engine.make_requests(Submission([1, 2], params, "a"), 0.0)
    assert request.free_running == is_free
