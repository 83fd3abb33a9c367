"""With a step in flight every request gets what it gets alone, without overlap: the real engine, random lives."""

import random

import pytest

from jaxserve import SamplingParams
from jaxserve.core import CompletionOutput, StructuredOutputs, Submission
from jaxserve.engine.stream import append_delta
from jaxserve.runtime import COMPILES
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts, random_submissions, run_alone
from tests.engine.test_trace_replay import replayed

SCARCE = {"page_size": 4, "num_pages": 40, "reservation": "optimistic"}  # one to three requests' worth
MODES = {
    "recompute": SCARCE | {"preemption": "recompute"},
    "swap": SCARCE | {"preemption": "swap", "enable_prefix_caching": False},
    "pause": {"preemption": "pause", "priority_preemption": True, "policy": "priority", "max_num_seqs": 3},
}
NUM_LIVES = 6


def random_params(rng, eos):
    """Settings of a request: each kind ends, or is bound, in its own way."""
    kinds = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0.9, "top_p": 0.9, "ignore_eos": True, "logprobs": 3},
        {"temperature": 1.2, "logit_bias": {eos: 9.0}},  # ends by EOS, sooner or later
        {"temperature": 1.2, "logit_bias": {eos: 9.0}, "min_tokens": 5},
        {"temperature": 0, "stop": ("e", "qu"), "ignore_eos": True},
        {"temperature": 1.0, "stop_token_ids": tuple(range(97, 103)), "ignore_eos": True},
        {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.5, "structured_outputs": StructuredOutputs(regex="[a-z]{2,9}[0-9]")},
        {"temperature": 1.0, "structured_outputs": StructuredOutputs(choice=["red", "reddish", "blue"])},
        {"temperature": 1.0, "bad_words": ("ab", "th", "ing"), "ignore_eos": True},
        {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1, "ignore_eos": True},
        {"temperature": 1.0, "n": 3, "ignore_eos": True, "stop": ("a",)},
    ]
    settings = rng.choice(kinds)
    lengths = [length for length in (1, 2, 3, 9, 20, 28) if length >= settings.get("min_tokens", 0)]
    return SamplingParams(seed=rng.randrange(2**31), max_tokens=rng.choice(lengths), **settings)


@pytest.fixture(scope="module")
def submissions(make_llm):
    eos = make_llm(overlap=False).engine.limits.eos_token_ids[0]
    return random_submissions(random_params, eos, seed=5, prompt_seed=4)


@pytest.fixture(scope="module")
def alone(make_llm, submissions):
    return run_alone(make_llm, submissions)


class Lives:
    """Submissions that arrive between steps, some of whose choices are aborted.

    Attributes:
      arrivals: submissions that come at once, at random.
      choices: by submission, each choice's output so far.
      prompt_logprobs: by submission.
      aborted: (submission, choice) of those that were aborted while they lived.
    """

    arrivals = (0, 1, 2, 4)

    def __init__(self, engine, submissions, seed):
        self._engine, self._submissions, self._rng = engine, submissions, random.Random(seed)
        self._live = {}
        self.choices = [[CompletionOutput(index) for index in range(each.params.n)] for each in submissions]
        self.prompt_logprobs = [None for _ in submissions]
        self.aborted = set()

    def run(self):
        engine, rng, left = self._engine, self._rng, list(range(len(self._submissions)))
        rng.shuffle(left)
        while left or engine.has_work:
            for _ in range(min(rng.choice(self.arrivals), len(left))):
                self._add(left.pop())
            engine.step()
            engine.scheduler.check_invariants()
            if self._live and rng.random() < 0.04:
                name = rng.choice(sorted(self._live))
                self.aborted.add(self._live[name])
                assert engine.abort(name)

    def _add(self, number):
        requests = self._engine.make_requests(self._submissions[number], 0.0)
        for index, request in enumerate(requests):
            self._live[request.request_id] = number, index
        self._engine.add_all(
            [
                (request, index, lambda delta, name=request.request_id: self._take(name, number, delta))
                for index, request in enumerate(requests)
            ]
        )

    def _take(self, name, number, delta):
        append_delta(self.choices[number][delta.index], delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[number] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            del self._live[name]


def assert_same_scores(got, want):
    """The same tokens, with nearly the same log-probabilities."""
    assert (got is None) == (want is None)
    for entry, other in zip(got or (), want or (), strict=True):
        token_id = next(iter(other or ()), None)
        assert next(iter(entry or ()), None) == token_id
        if token_id is not None:
            assert entry[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def assert_as_alone(lives, alone):
    for number, want in enumerate(alone):
        for index, (got, whole) in enumerate(zip(lives.choices[number], want.outputs, strict=True)):
            if (number, index) in lives.aborted:
                assert got.token_ids == whole.token_ids[: len(got.token_ids)]
                assert got.finish_reason == "abort"
                continue
            assert got.token_ids == whole.token_ids, (number, index)
            assert (got.text, got.finish_reason) == (whole.text, whole.finish_reason)
            assert got.stop_reason == whole.stop_reason
            assert_same_scores(got.logprobs, whole.logprobs)
        if (number, 0) not in lives.aborted:
            assert_same_scores(lives.prompt_logprobs[number], want.prompt_logprobs)


@pytest.mark.parametrize(("mode", "overlap"), [("recompute", True), ("swap", True), ("pause", True), ("swap", False)])
def test_random_lives_get_what_they_get_alone(make_llm, submissions, alone, mode, overlap):
    llm = make_llm(**MODES[mode], overlap=overlap)
    engine = llm.engine
    engine.reset_prefix_cache()
    engine.runner.fill_pool(float("nan"))
    compiles, preemptions, wasted = COMPILES.count, engine.scheduler.counters.preemptions, engine.stats.wasted_rows
    num_aborted = 0
    for seed in range(NUM_LIVES):
        lives = Lives(engine, submissions, seed)
        lives.run()
        assert_as_alone(lives, alone)
        num_aborted += len(lives.aborted)
    assert num_aborted, "nothing was aborted: the test shows less"
    assert engine.scheduler.counters.preemptions > preemptions, "nothing was preempted: the test shows less"
    assert (engine.stats.wasted_rows > wasted) == overlap
    assert COMPILES.count == compiles
    assert_idle_clean(llm)


def test_a_run_with_steps_in_flight_replays_to_the_byte(make_llm, submissions, tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = make_llm(**MODES["recompute"], trace_file=str(path)).engine
    lives = Lives(engine, submissions, 0)
    lives.run()
    engine.close()
    records = replayed(path)
    assert any(record.in_flight for record in records)
    assert engine.scheduler.counters.preemptions and lives.aborted


def test_an_interrupted_run_leaves_an_engine_that_goes_on(make_llm):
    llm = make_llm()
    prompts = random_prompts((9, 40, 17))
    want = ids(llm.generate(prompts, greedy(12), use_tqdm=False))
    deltas = []

    def interrupt(delta):
        deltas.append(delta)
        if len(deltas) == 3:
            raise KeyboardInterrupt

    for request in llm.engine.make_requests(Submission(prompts[0], greedy(12), "a"), 0.0):
        llm.engine.add(request, 0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(12), use_tqdm=False)
    assert llm.engine.has_work, "no step was in flight: the test shows nothing"
    assert ids(llm.generate(prompts, greedy(12), use_tqdm=False)) == want
    assert_idle_clean(llm)


@pytest.mark.parametrize("method", ["collect", "sample"])
@pytest.mark.parametrize("turn", [2, 3, 4])
def test_an_interrupt_before_a_masked_step_is_sampled_harms_no_later_request(make_llm, monkeypatch, method, turn):
    """Sampled after the next step, it would write its token over the one that the next request decodes from."""
    llm = make_llm()
    prompts = random_prompts((9, 40, 17))
    want = ids(llm.generate(prompts, greedy(12), use_tqdm=False))
    runner, calls = llm.engine.runner, []
    original = getattr(runner, method)

    def interrupt(*args):
        calls.append(args)
        if len(calls) == turn:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(runner, method, interrupt)
    masked = greedy(12, structured_outputs=StructuredOutputs(regex="[a-z]{30}"))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, masked, use_tqdm=False)
    assert ids(llm.generate(prompts, greedy(12), use_tqdm=False)) == want
    assert_idle_clean(llm)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_scores_of_a_chunk_in_flight_go_to_no_later_request_of_the_same_id(make_llm, steps):
    """A prompt of three chunks is aborted with one in flight; another prompt takes its id, slot and pages."""
    llm = make_llm(prefill_chunk=16, max_num_seqs=1, enable_prefix_caching=False)
    engine = llm.engine
    params = greedy(2, prompt_logprobs=0)
    first, second = random_prompts((48, 45), seed=9)
    want = llm.generate([second], params, use_tqdm=False)[0].prompt_logprobs
    found = []

    def add(prompt, sink):
        for request in engine.make_requests(Submission(prompt, params, "same"), 0.0):
            engine.add(request, 0, sink)

    add(first, lambda delta: None)
    for _ in range(steps):
        engine.step()
    assert engine.abort("same")
    add(second, lambda delta: found.append(delta.prompt_logprobs) if delta.prompt_logprobs else None)
    while engine.has_work:
        engine.step()
    (scores,) = found
    assert_same_scores(scores, want)
    assert_idle_clean(llm)
