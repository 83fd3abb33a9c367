"""Whatever is asked of an engine, in whatever order: hypothesis plays its client, and shortens what goes wrong.

`tests/scheduler/test_properties.py` does the same to the scheduler alone, on a fake device. Here are the real step
programs, sampler, grammars and text, with little room for pages. A request of which nothing went amiss gets what it
gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxserve import SamplingParams
from jaxserve.core import CompletionOutput, RejectedError, StructuredOutputs, Submission, Terms
from jaxserve.engine.stream import append_delta
from jaxserve.runtime import COMPILES
from jaxserve.testing.tiny import EOS_ID
from tests.engine.conftest import random_prompts

MODES = {
    "recompute": {"page_size": 4, "num_pages": 40, "reservation": "optimistic", "preemption": "recompute"},
    "swap": {"page_size": 4, "num_pages": 40, "reservation": "optimistic", "preemption": "swap"},
    "pause": {"preemption": "pause", "priority_preemption": True, "policy": "priority", "max_num_seqs": 2},
    "steps": {"max_decode_steps": 4, "max_num_seqs": 4},
    "one": {"overlap": False, "max_num_seqs": 3, "policy": "fair", "max_queue_requests": 3},
}
PROMPTS = random_prompts((1, 3, 17, 33, 60), seed=9)
PROMPTS += [PROMPTS[3][:16] + PROMPTS[2], PROMPTS[4][:48]]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "ignore_eos": True, "logprobs": 2},
    {"temperature": 1.2, "logit_bias": {EOS_ID: 9.0}, "min_tokens": 2},
    {"temperature": 0, "stop": ("e", "qu"), "ignore_eos": True, "include_stop_str_in_output": True},
    {"temperature": 1.0, "stop_token_ids": (97, 101, 105), "ignore_eos": True},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.5, "structured_outputs": StructuredOutputs(regex="[a-z]{2,9}[0-9]")},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(choice=["red", "reddish"]), "n": 2},
    {"temperature": 1.0, "bad_words": ("ab", "th"), "allowed_token_ids": tuple(range(97, 123)), "ignore_eos": True},
    {"temperature": 0, "prompt_logprobs": 1, "ignore_eos": True},
    {"temperature": 1.0, "n": 3, "ignore_eos": True},
)


class EngineMachine(RuleBasedStateMachine):
    """One engine, idle at first and at the end.

    Attributes:
      make_llm: the fixture.
      alone: outputs by (prompt, kind, length, seed) of requests that ran alone, kept from one life to the next.
    """

    make_llm: Callable[..., Any]
    alone: dict[tuple[int, int, int, int], list[CompletionOutput]]

    @initialize(mode=st.sampled_from(sorted(MODES)))
    def start(self, mode: str) -> None:
        self.llm = self.make_llm(**MODES[mode])
        self.engine = self.llm.engine
        self.compiles = COMPILES.count
        self.number = 0
        self.outputs: dict[str, CompletionOutput] = {}
        self.asked: dict[str, tuple[tuple[int, int, int, int], int]] = {}
        self.live: dict[str, None] = {}
        self.amiss: set[str] = set()

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        kind=st.integers(0, len(KINDS) - 1),
        length=st.sampled_from([0, 1, 2, 5, 24]),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a"]),
        deadline_s=st.sampled_from([None, None, None, 600.0, 1e-4]),
    )
    def add(
        self, prompt: int, kind: int, length: int, seed: int, priority: int, tenant: str, deadline_s: float | None
    ) -> None:
        length = max(length, KINDS[kind].get("min_tokens", 0))
        case = (prompt, kind, length, seed)
        name, self.number = f"r{self.number}", self.number + 1
        terms = Terms(priority=priority, tenant=tenant, deadline_s=deadline_s)
        submission = Submission(PROMPTS[prompt], params_of(case), name, terms)
        requests = self.engine.make_requests(submission, time.monotonic())
        for index, request in enumerate(requests):
            self.asked[request.request_id] = case, index
            self.outputs[request.request_id] = CompletionOutput(index)
            self.live[request.request_id] = None
            if deadline_s == 1e-4:
                self.amiss.add(request.request_id)
        try:
            self.engine.add_all([(each, index, self._sink(each.request_id)) for index, each in enumerate(requests)])
        except RejectedError:
            for each in requests:  # all of them, or none
                assert not self.outputs[each.request_id].token_ids
                del self.live[each.request_id], self.outputs[each.request_id]

    @rule(
        arrivals=st.lists(
            st.tuples(st.integers(3, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), st.integers(-1, 1)),
            min_size=3,
            max_size=6,
        ),
        steps=st.integers(0, 6),
    )
    def add_more_than_there_is_room_for(self, arrivals: list[tuple[int, int, int]], steps: int) -> None:
        for seed, (prompt, kind, priority) in enumerate(arrivals):
            self.add(prompt, kind, 24, seed, priority, "", None)
            self.step(steps)

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        if self.live:
            name = list(self.live)[which % len(self.live)]
            self.amiss.add(name)
            assert self.engine.abort(name)
        assert not self.engine.abort("nobody")

    @rule(which=st.integers(0, 99))
    def add_a_live_id_again(self, which: int) -> None:
        if not self.live:
            return
        name = list(self.live)[which % len(self.live)]
        if "#" in name:
            return
        submission = Submission(PROMPTS[0], SamplingParams(max_tokens=1), name)
        with pytest.raises(RejectedError):
            for request in self.engine.make_requests(submission, time.monotonic()):
                self.engine.add(request, 0, lambda delta: pytest.fail(f"a refused request got {delta}"))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.scheduler.check_invariants()

    @rule()
    def land(self) -> None:
        self.engine.land()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule()
    def drain(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work, f"after 3000 steps {list(self.live)} are live"
        assert not self.live, "the engine is idle, and some have had no end"

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        scheduler.check_invariants()
        owned = scheduler.pages_free + scheduler.pages_cached + scheduler.pages_owned
        assert owned == self.engine.runner.scheduler_config.num_pages - 1
        assert scheduler.num_running + scheduler.num_waiting <= len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.drain()
        self.engine.land()
        assert self.engine.scheduler.pages_owned == 0
        assert COMPILES.count == self.compiles, "something was compiled after warm-up"
        for name, output in self.outputs.items():
            case, index = self.asked[name]
            whole = self._alone(case)[index]
            if name in self.amiss:
                assert output.token_ids == whole.token_ids[: len(output.token_ids)], (name, case)
                continue
            assert output.token_ids == whole.token_ids, (name, case)
            assert (output.text, output.finish_reason) == (whole.text, whole.finish_reason), (name, case)

    def _sink(self, name: str) -> Callable[[Any], None]:
        def take(delta: Any) -> None:
            assert name in self.live, f"{name} had ended, and got {delta}"
            append_delta(self.outputs[name], delta)
            if delta.finish_reason is not None:
                del self.live[name]

        return take

    def _alone(self, case: tuple[int, int, int, int]) -> list[CompletionOutput]:
        if case not in self.alone:
            llm = self.make_llm(overlap=False, enable_prefix_caching=False)
            (output,) = llm.generate([PROMPTS[case[0]]], params_of(case), use_tqdm=False)
            self.alone[case] = output.outputs
        return self.alone[case]

    @classmethod
    def count(cls, name: str) -> int:
        """A counter of the schedulers of all modes together."""
        return sum(getattr(cls.make_llm(**mode).engine.scheduler.counters, name) for mode in MODES.values())


def params_of(case: tuple[int, int, int, int]) -> SamplingParams:
    """The settings of a (prompt, kind, length, seed)."""
    _, kind, length, seed = case
    return SamplingParams(max_tokens=length, seed=seed, **KINDS[kind])


@pytest.fixture(scope="module")
def machine(make_llm):
    """The machine, whose engines are warm."""
    for mode in MODES.values():
        make_llm(**mode)
    make_llm(overlap=False, enable_prefix_caching=False)
    return type("Machine", (EngineMachine,), {"make_llm": staticmethod(make_llm), "alone": {}})


LIVES = settings(database=None, suppress_health_check=list(HealthCheck))


def test_whatever_is_asked_of_an_engine_it_answers_everyone(machine):
    few = settings(LIVES, max_examples=120, stateful_step_count=30, derandomize=True)
    names = ("completed", "aborted", "preemptions", "cached_tokens")
    before = [machine.count(name) for name in names]
    run_state_machine_as_test(machine, settings=few)
    seen = {name: machine.count(name) - was for name, was in zip(names, before, strict=True)}
    assert all(count > 10 for count in seen.values()), f"lives in which too little happened show little: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_so_it_does_for_many_more_lives(machine):
    run_state_machine_as_test(machine, settings=settings(LIVES, max_examples=1500, stateful_step_count=60))
