"""A step fails, or its numbers are broken: whoever can go on does, with the ids of a run without faults."""

import logging

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core import CompletionOutput, StructuredOutputs, Submission, Terms
from jaxserve.engine.stream import append_delta
from jaxserve.faults import Fault, FaultPlan, InjectedFault, use_fault_plan
from jaxserve.runtime import COMPILES
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.engine.test_trace_replay import replayed

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "num_pages": 66,
    "decode_buckets": (8,),
    "prefill_buckets": (64,),
    "table_width_buckets": (8,),
}
SCARCE = {"page_size": 4, "num_pages": 40, "reservation": "optimistic", "table_width_buckets": (32,)}
MODES = {
    "overlap": {},
    "no_overlap": {"overlap": False},
    "no_cache": {"enable_prefix_caching": False},
    "steps": {"max_decode_steps": 4, "max_arrival_delay_s": 1e6},
    "recompute": SCARCE | {"preemption": "recompute"},
    "swap": SCARCE | {"preemption": "swap", "enable_prefix_caching": False},
    "pause": {"preemption": "pause", "priority_preemption": True, "policy": "priority", "max_num_seqs": 3},
}
PLACES = ("runner.dispatch", "runner.sample", "runner.collect")
PROMPTS = random_prompts((9, 40, 17, 3, 33, 60, 1, 25), seed=2)
PARAMS = [
    greedy(44),
    SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=2),
    greedy(20, structured_outputs=StructuredOutputs(regex="[a-z]{12}[0-9]{3}")),
    SamplingParams(temperature=0.8, seed=6, max_tokens=42, presence_penalty=1.0, repetition_penalty=1.2),
    greedy(1),
    greedy(37, prompt_logprobs=1),
    greedy(50, stop=("qqqq",)),
    SamplingParams(temperature=1.1, seed=7, max_tokens=45, ignore_eos=True, bad_words=("ab", "th")),
]
FREE = [greedy(24), SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True), greedy(9)] * 2


@pytest.fixture(scope="module")
def make_faulty(tiny_model_dir):
    """`make_faulty(**settings)`: an LLM whose failpoints are ready; no plan is in use."""
    made = {}

    def make(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            use_fault_plan(FaultPlan([]))
            made[key] = LLM(str(tiny_model_dir), compile_cache="", **(SETTINGS | settings))
            use_fault_plan(None)
        made[key].engine.reset_prefix_cache()
        return made[key]

    yield make
    for llm in made.values():
        assert_idle_clean(llm)


@pytest.fixture(autouse=True)
def no_faults_left():
    yield
    use_fault_plan(None)


def run(llm, prompts=PROMPTS, params=PARAMS, faults=(), terms=None):
    """Outputs by request, each delta taken once; nothing may be compiled, and the engine is left clean.

    The last requests come while the others run.
    """
    engine, outputs = llm.engine, {}
    compiles = COMPILES.count
    use_fault_plan(FaultPlan(faults) if faults else None)
    try:
        for index, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
            terms_of = terms[index] if terms else Terms()
            for request in engine.make_requests(Submission(prompt, settings, f"r{index}", terms_of), 0.0):
                output = outputs[f"r{index}"] = CompletionOutput(0)
                engine.add(request, 0, lambda delta, output=output: append_delta(output, delta))
            if index >= 5:
                engine.step()
                engine.step()
        while engine.has_work:
            engine.step()
            engine.scheduler.check_invariants()
    finally:
        use_fault_plan(None)
    assert COMPILES.count == compiles
    counters = engine.scheduler.counters
    assert counters.offered == counters.num_ended
    assert_idle_clean(llm)
    assert engine.scheduler.host_pages_free == engine.scheduler.config.num_host_pages
    return outputs


def metric(llm, name, **labels):
    labels = {"model_name": llm.engine.model_name, "engine": "0"} | labels
    return llm.engine.metrics.registry.get_sample_value(f"jaxserve:{name}", labels)


def assert_alike(found, want, but=()):
    """The same outputs, but for those of `but`, which failed."""
    for name, output in want.items():
        if name in but:
            assert found[name].finish_reason == "error", name
            assert found[name].token_ids == output.token_ids[: len(found[name].token_ids)]
            continue
        assert found[name].token_ids == output.token_ids, name
        assert (found[name].text, found[name].finish_reason) == (output.text, output.finish_reason)
        assert len(found[name].logprobs or ()) == len(output.logprobs or ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_once_costs_nobody_a_token(make_faulty, mode, place):
    llm = make_faulty(**MODES[mode])
    terms = [Terms(priority=-10 * (index % 3)) for index in range(len(PROMPTS))] if mode == "pause" else None
    preemptions = llm.engine.scheduler.counters.preemptions
    want = run(llm, terms=terms)
    if mode in ("recompute", "swap", "pause"):
        assert llm.engine.scheduler.counters.preemptions > preemptions, "nobody was preempted: the test shows less"
    before = metric(llm, "step_recoveries_total")
    for skip in (0, 4, 11):
        llm.engine.reset_prefix_cache()
        faults = [Fault(place, "raise", skip=skip), Fault(place, "raise", skip=skip + 7)]
        assert_alike(run(llm, faults=faults, terms=terms), want)
    assert metric(llm, "step_recoveries_total") - before == 6
    assert metric(llm, "requests_failed_by_step_total") == 0


@pytest.mark.parametrize("place", PLACES)
def test_so_it_is_with_several_decode_steps(make_faulty, place):
    llm = make_faulty(**MODES["steps"])
    prompts = PROMPTS[: len(FREE)]
    want = run(llm, prompts, FREE)
    run(llm, prompts, FREE)
    several = llm.engine.stats.steps > llm.engine.stats.iterations
    assert several, "no plan had several steps: the test shows less"
    for skip in (0, 2, 4):
        assert_alike(run(llm, prompts, FREE, [Fault(place, "raise", skip=skip)]), want)


def test_a_pool_that_is_lost_is_made_anew(make_faulty, monkeypatch):
    """The program consumed its buffers and gave nothing back."""
    for mode in ("overlap", "swap", "steps"):
        llm = make_faulty(**MODES[mode])
        want = run(llm)
        runner, calls = llm.engine.runner, []
        original = runner.dispatch

        def lose(prepared, runner=runner, original=original, calls=calls):
            calls.append(prepared)
            if len(calls) in (3, 9):
                for array in (*runner._pool[:1], *runner._state):
                    array.delete()
                raise InjectedFault("the device lost its memory")
            return original(prepared)

        monkeypatch.setattr(runner, "dispatch", lose)
        assert_alike(run(llm), want)
        monkeypatch.undo()


@pytest.mark.parametrize("mode", ["overlap", "no_overlap", "recompute", "swap"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("culprit", ["r0", "r3", "r7"])
def test_the_request_that_makes_steps_fail_ends_alone(make_faulty, mode, place, culprit):
    llm = make_faulty(**MODES[mode])
    want = run(llm)
    failed = metric(llm, "requests_failed_by_step_total")
    found = run(llm, faults=[Fault(place, "raise", request_id=culprit, times=None, skip=2)])
    assert_alike(found, want, but=[culprit])
    assert "whenever this request had part in it" in found[culprit].error
    assert metric(llm, "requests_failed_by_step_total") - failed == 1
    assert_alike(run(llm), want)


@pytest.mark.parametrize("mode", ["overlap", "no_overlap"])
def test_a_failure_of_a_step_whose_requests_are_all_aborted_ends_nothing_else(make_faulty, monkeypatch, mode):
    llm = make_faulty(**MODES[mode])
    want = run(llm)
    engine, runner = llm.engine, llm.engine.runner
    for request in engine.make_requests(Submission(PROMPTS[0], PARAMS[0], "gone"), 0.0):
        engine.add(request, 0, lambda delta: None)
    engine.step()
    original = runner.collect

    def abort_and_fail(handle):
        monkeypatch.setattr(runner, "collect", original)
        engine.abort("gone")
        raise InjectedFault("nobody is there")

    monkeypatch.setattr(runner, "collect", abort_and_fail)
    while engine.has_work:
        engine.step()
    assert runner.collect == original, "no step failed: the test shows nothing"
    assert_alike(run(llm), want)


def test_two_of_them_end_and_the_others_go_on(make_faulty):
    llm = make_faulty()
    want = run(llm)
    faults = [Fault("runner.collect", "raise", request_id=name, times=None) for name in ("r1", "r6")]
    assert_alike(run(llm, faults=faults), want, but=["r1", "r6"])


def test_of_two_steps_that_fail_the_older_ones_error_is_the_cause(make_faulty):
    llm = make_faulty(seed=1)  # its own, as its token budget is smaller afterwards
    want = run(llm)
    before = [metric(llm, "step_failures_total", kind=kind) for kind in ("out_of_memory", "error")]
    # The step behind cannot be dispatched, and only then it shows that the one in flight had no memory.
    faults = [Fault("runner.dispatch", "raise", skip=9), Fault("runner.collect", "out_of_memory", skip=8)]
    assert_alike(run(llm, faults=faults), want)
    after = [metric(llm, "step_failures_total", kind=kind) for kind in ("out_of_memory", "error")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["overlap", "no_overlap", "recompute", "swap", "steps"])
def test_without_device_memory_steps_become_smaller_and_grow_again(make_faulty, mode, place):
    llm = make_faulty(**MODES[mode])
    want = run(llm)
    budget = llm.engine.scheduler.config.max_num_batched_tokens
    assert llm.engine.scheduler.token_budget == metric(llm, "token_budget") == budget
    before = metric(llm, "step_failures_total", kind="out_of_memory")
    found = run(llm, faults=[Fault(place, "out_of_memory", skip=3, times=3)])
    assert_alike(found, want)
    assert metric(llm, "step_failures_total", kind="out_of_memory") - before == 3
    small = llm.engine.scheduler.token_budget
    assert small == metric(llm, "token_budget") < budget
    for _ in range(20):
        if llm.engine.scheduler.token_budget == budget:
            break
        assert_alike(run(llm), want)
    assert llm.engine.scheduler.token_budget == metric(llm, "token_budget") == budget


def test_a_request_for_which_there_is_never_memory_ends_alone(make_faulty):
    llm = make_faulty()
    want = run(llm)
    found = run(llm, faults=[Fault("runner.dispatch", "out_of_memory", request_id="r5", times=None)])
    assert_alike(found, want, but=["r5"])


@pytest.mark.parametrize("mode", ["overlap", "no_overlap", "no_cache", "recompute", "swap"])
@pytest.mark.parametrize("victim", ["r0", "r2", "r3", "r5"])
def test_nan_ends_its_request_alone(make_faulty, mode, victim):
    llm = make_faulty(**MODES[mode])
    want = run(llm)
    llm.engine.reset_prefix_cache()
    before = metric(llm, "nan_logits_total")
    found = run(llm, faults=[Fault("runner.dispatch", "nan", request_id=victim, skip=2, times=None)])
    assert_alike(found, want, but=[victim])
    assert "not a number" in found[victim].error
    assert metric(llm, "nan_logits_total") - before == 1
    # What it left in its pages is found by nobody.
    assert_alike(run(llm), want)


def test_nan_in_a_later_chunk_of_a_prompt_ends_its_request(make_faulty):
    """The first chunk's pages are broken; so is what the second one computes, which emits a token."""
    llm = make_faulty(prefill_chunk=16, overlap=False)
    want = run(llm)
    found = run(llm, faults=[Fault("runner.dispatch", "nan", request_id="r5", times=1)])
    assert_alike(found, want, but=["r5"])
    assert found["r5"].token_ids == []
    assert_alike(run(llm), want)


def test_nan_within_several_decode_steps_ends_its_row_alone(make_faulty):
    llm = make_faulty(**MODES["steps"])
    prompts = PROMPTS[: len(FREE)]
    want = run(llm, prompts, FREE)
    found = run(llm, prompts, FREE, [Fault("runner.dispatch", "nan", request_id="r1", skip=2)])
    assert_alike(found, want, but=["r1"])
    assert_alike(run(llm, prompts, FREE), want)


def test_what_fails_whoever_takes_part_raises_the_first_cause(make_faulty):
    llm = make_faulty()
    want = run(llm)
    with pytest.raises(InjectedFault, match=r"runner\.sample"):
        run(llm, faults=[Fault("runner.sample", "raise", times=None)])
    llm.engine.abort_all()
    assert_alike(run(llm), want)


def test_a_recovery_that_fails_raises_its_cause_from_the_step_s(make_faulty):
    llm = make_faulty()
    want = run(llm)
    with pytest.raises(InjectedFault, match=r"runner\.recover") as caught:
        run(llm, faults=[Fault("runner.collect", "raise"), Fault("runner.recover", "raise")])
    assert isinstance(caught.value.__cause__, InjectedFault) and "runner.collect" in str(caught.value.__cause__)
    llm.engine.abort_all()
    assert_alike(run(llm), want)


def test_a_copy_to_the_host_that_fails_costs_nobody_a_token(make_faulty):
    llm = make_faulty(**MODES["swap"])
    want = run(llm)
    before = metric(llm, "step_recoveries_total")
    assert_alike(run(llm, faults=[Fault("swap.out", "raise"), Fault("swap.out", "raise")]), want)
    assert metric(llm, "step_recoveries_total") - before == 2


@pytest.mark.parametrize("settings", [{}, SCARCE | {"preemption": "swap", "enable_prefix_caching": False}])
def test_a_run_with_failures_replays_to_the_byte(make_faulty, tmp_path, settings):
    path = tmp_path / "trace.jsonl"
    llm = make_faulty(**settings, trace_file=str(path))
    faults = [
        Fault("runner.dispatch", "raise", skip=4),
        Fault("runner.collect", "out_of_memory", skip=9, times=2),
        Fault("runner.sample", "raise", request_id="r3", skip=12, times=None),
        Fault("runner.dispatch", "nan", request_id="r1", skip=3, times=None),
    ]
    found = run(llm, faults=faults)
    run(llm)
    llm.engine.close()
    assert {name for name, output in found.items() if output.finish_reason == "error"} == {"r1", "r3"}
    records = replayed(path)
    kinds = {event["kind"] for record in records for event in record.data["events"]}
    assert kinds >= {"recover", "hold", "release", "budget", "abort"}


@pytest.mark.parametrize("method", ["prepare", "dispatch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_before_a_step_is_dispatched_leaves_an_engine_that_goes_on(
    make_faulty, monkeypatch, method, overlap
):
    llm = make_faulty(**({} if overlap else MODES["no_overlap"]))
    want = ids(llm.generate(PROMPTS, greedy(9), use_tqdm=False))
    original, calls = getattr(llm.engine.runner, method), []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(llm.engine.runner, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(9), use_tqdm=False)
    assert ids(llm.generate(PROMPTS, greedy(9), use_tqdm=False)) == want


def test_the_log_tells_of_a_failure(make_faulty, caplog):
    llm = make_faulty()
    with caplog.at_level(logging.WARNING):
        run(llm, faults=[Fault("runner.collect", "out_of_memory", skip=2)])
    assert "the collect of a step failed" in caplog.text
    assert "steps have at most" in caplog.text


def test_generate_returns_the_failed_request_with_its_error(make_faulty):
    llm = make_faulty()
    want = ids(llm.generate(PROMPTS[:3], greedy(8), use_tqdm=False))
    use_fault_plan(FaultPlan([Fault("runner.dispatch", "raise", request_id="1*", times=None)]))
    outputs = llm.generate(PROMPTS[:3], greedy(8), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert [ids(outputs)[0], ids(outputs)[2]] == [want[0], want[2]]
