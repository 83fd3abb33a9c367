"""The simulator: instants worked out by hand, queueing theory, and the scheduler's own rules."""

import gc
import json
import math
import tracemalloc

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import Scheduler, TraceWriter
from jaxserve.sim.cost_model import LinearCost, UnitCost
from jaxserve.sim.fixed_workload import load_workload
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of
from jaxserve.sim.workload import parse_workload


def config(**changes):
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "prefill_chunk": 8, "page_size": 4, "num_pages": 65}
    return SchedulerConfig(**(settings | {"max_model_len": 64} | changes))


def arrival(number, at, prompt=4, output=3, **fields):
    request = make_request(f"r{number}", prompt_of(number, prompt), output, **fields)
    return Arrival(at, request, output, "normal")


def run(*arrivals, cost=None, **changes):
    source = TimedSource(iter(arrivals))
    return Simulator(config(**changes), cost or UnitCost(), source, keep_ids=True).run()


def mixed_workload(num_requests=300, seed=7):
    document = {
        "num_requests": num_requests,
        "seed": seed,
        "arrivals": {"kind": "gamma", "rate": 0.25, "cv": 2.0},
        "prompt": {"kind": "uniform", "low": 1, "high": 20},
        "output": {"kind": "exponential", "mean": 6, "max": 20},
        "max_tokens": 24,
        "classes": [
            {"name": "web", "priority": "high", "deadline_s": 40},
            {"name": "batch", "priority": "low", "share": 2},
        ],
    }
    return parse_workload(document, "mixed")


def test_it_runs_the_serving_scheduler_itself():
    assert type(Simulator(config(), UnitCost(), TimedSource(iter(()))).scheduler) is Scheduler


def test_instants_of_two_requests_by_hand():
    """Costs: 1 s, 0.1 s per decode row, 0.01 s per token read, 0.2 s per prompt token, 0.001 s per token attended."""
    cost = LinearCost(1.0, 0.1, 0.01, 0.2, 0.001)
    log = run(arrival(0, 0.5), arrival(1, 1.0, prompt=2, output=2), cost=cost).log
    first = 0.5 + 1.0 + 4 * 0.2 + 10 * 0.001  # r0's prompt; r1 comes meanwhile
    second = first + 1.0 + 0.1 + 5 * 0.01 + 2 * 0.2 + 3 * 0.001  # r0 decodes at context 5, r1's prompt
    third = second + 1.0 + 2 * 0.1 + (6 + 3) * 0.01
    assert log.started_at.tolist() == pytest.approx([0.5, first])
    assert log.first_at.tolist() == pytest.approx([first, second])
    assert log.ended_at.tolist() == pytest.approx([third, third])
    assert log.largest_gap_s.tolist() == pytest.approx([max(second - first, third - second), third - second])
    assert (log.num_prompt.tolist(), log.num_output.tolist()) == ([4, 2], [3, 2])


def test_time_jumps_to_the_next_arrival_when_nobody_is_live():
    result = run(arrival(0, 0.0), arrival(1, 1e6))
    assert result.log.first_at.tolist() == [1.0, 1e6 + 1.0]
    assert result.totals.iterations == 6
    assert result.totals.busy_s == 6.0


def test_an_arrival_at_the_end_of_an_iteration_is_in_the_next():
    assert run(arrival(0, 0.0), arrival(1, 1.0)).log.started_at.tolist() == [0.0, 1.0]
    assert run(arrival(0, 0.0), arrival(1, 1.001)).log.started_at.tolist() == [0.0, 2.0]


def test_planning_ahead_costs_a_late_arrival_one_iteration():
    """With a plan in flight the next one is made when it starts, not when it ends."""
    arrivals = (arrival(0, 0.0, output=5), arrival(1, 0.5))
    assert run(*arrivals).log.started_at.tolist() == [0.0, 1.0]
    ahead = run(*arrivals, max_steps_ahead=1)
    assert ahead.log.started_at.tolist() == [0.0, 2.0]
    assert ahead.log.ended_at.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_request_that_declared_more_ends_by_its_stop_id(ahead):
    result = run(arrival(0, 0.0, output=3, max_tokens=30), max_steps_ahead=ahead)
    assert result.log.num_output.tolist() == [3]
    assert result.log.outcome_of(0) == "completed"
    assert result.log.ended_at.tolist() == [3.0]
    assert result.totals.wasted_rows == ahead, "a row in each plan made before its stop id came"


def test_refusals_and_expiries_have_their_reason():
    result = run(
        *(arrival(number, 0.0) for number in range(4)),
        arrival(9, 0.5, prompt=60, output=10),
        arrival(10, 3.5, output=9, deadline_at=6.5),
        max_queue_requests=1,
    )
    log = result.log
    outcomes = [log.outcomes[code] for code in log.outcome]
    assert outcomes == ["completed"] * 3 + ["queue_full_requests", "never_fits", "expired"]
    assert [log.outcome_of(index) for index in (3, 4, 5)] == ["rejected", "rejected", "expired"]
    # Deadlines are looked at when an iteration is planned.
    assert log.ended_at[5] == 7.0


def test_the_limit_leaves_requests_live():
    source = TimedSource(iter([arrival(0, 0.0, output=50), arrival(1, 100.0)]))
    result = Simulator(config(), UnitCost(), source, max_iterations=5).run()
    assert result.termination == "iteration_limit"
    assert len(result.log) == 1
    assert (result.log.outcome_of(0), result.log.num_output[0], result.log.last_at[0]) == ("live", 5, 5.0)


class CheckingCost(UnitCost):
    """Checks the scheduler's invariants at every plan."""

    scheduler = None

    def step_s(self, features):
        self.scheduler.check_invariants()
        return 1.0


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_crowded_run_keeps_every_invariant_and_loses_nobody(ahead):
    cost, workload = CheckingCost(), mixed_workload()
    settings = config(priority_preemption=True, max_queue_requests=8, num_pages=33, max_steps_ahead=ahead)
    simulator = Simulator(settings, cost, workload.source())
    cost.scheduler = simulator.scheduler
    report = figures(simulator.run(), Objectives())
    simulator.scheduler.check_invariants()
    assert simulator.scheduler.idle
    ended = ("completed", "rejected", "expired", "aborted", "failed", "live")
    assert report["offered"] == 300 == sum(report[name] for name in ended)
    # The run is worth checking: all of these happened.
    assert min(report[name] for name in ("completed", "rejected", "expired", "preemptions")) > 0
    counters = simulator.scheduler.counters
    assert (counters.completed, counters.preemptions) == (report["completed"], report["preemptions"])


def test_the_same_workload_gives_the_same_trace_and_another_seed_another():
    traces = []
    for seed in (1, 1, 2):
        records = []
        Simulator(config(), UnitCost(), mixed_workload(50, seed).source(), trace=records.append).run()
        traces.append(records)
    assert traces[0] == traces[1] != traces[2]


def test_the_waiting_time_is_that_of_queueing_theory():
    """One slot, one iteration per request, poisson arrivals: an M/D/1 queue waits load / (2 (1 - load)) on average."""
    load = 0.6
    document = {"num_requests": 20_000, "arrivals": {"kind": "poisson", "rate": load}, "prompt": 1, "output": 1}
    settings = config(max_num_seqs=1, max_queue_requests=10_000)
    result = Simulator(settings, UnitCost(), parse_workload(document, "m/d/1").source()).run()
    report = figures(result, Objectives())
    assert report["queue_s"]["mean"] == pytest.approx(load / (2 * (1 - load)), rel=0.06)
    assert report["busy_share"] == pytest.approx(load, rel=0.02)


def test_finished_requests_leave_only_numbers_behind():
    def peak(num_requests):
        document = {
            "num_requests": num_requests,
            "arrivals": {"kind": "constant", "rate": 1.0},
            "prompt": 40,
            "output": 2,
        }
        simulator = Simulator(config(), UnitCost(), parse_workload(document, "long").source())
        gc.collect()
        tracemalloc.start()
        simulator.run()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    # The timeline is bounded, but both runs must have filled it.
    assert (peak(6_000) - peak(3_000)) / 3_000 < 150


def test_a_recorded_trace_is_a_workload_that_gives_the_same_trace(tmp_path):
    settings = config(priority_preemption=True, max_queue_requests=4)

    def trace_of(workload, path):
        writer = TraceWriter(path, config=settings)
        Simulator(settings, UnitCost(), workload.source(), trace=writer).run()
        writer.close()
        return path.read_text()

    # The first arrival is the recording's zero.
    entries = [{"arrival": at, "prompt_len": 5 + at % 3, "max_tokens": 9, "output": 1 + at % 9} for at in range(0, 40)]
    for index, entry in enumerate(entries):
        entry["priority"] = ("high", "normal", "low")[index % 3]
    workload_file = tmp_path / "list.json"
    workload_file.write_text(json.dumps({"requests": entries}))
    first = trace_of(load_workload(workload_file), tmp_path / "first.jsonl")
    again = trace_of(load_workload(tmp_path / "first.jsonl"), tmp_path / "again.jsonl")
    assert "queue_full_requests" in first
    # What was refused is assumed to use what it declared; it is refused again.
    assert again == first


def test_a_batch_that_is_held_back_goes_when_its_time_is_up():
    held_back = {"batching": "request_dynamic", "batch_timeout_s": 2.1}
    assert run(arrival(0, 0.3), **held_back).log.started_at.tolist() == pytest.approx([2.4])
    # Full: it goes at once. The third waits for the end of the batch, then for its own time.
    full = run(arrival(0, 0.3), arrival(1, 1.0), arrival(2, 1.5), **held_back)
    assert full.log.started_at.tolist() == [1.0, 1.0, 4.0]
    late = run(arrival(0, 0.3), arrival(1, 1.0), arrival(2, 3.5), **held_back)
    assert late.log.started_at.tolist() == pytest.approx([1.0, 1.0, 5.6])


def test_a_displaced_request_is_a_refused_one():
    result = run(
        *(arrival(number, 0.0) for number in range(3)),
        arrival(3, 0.5, priority=-10),
        max_queue_requests=1,
        queue_displacement=True,
    )
    log = result.log
    assert [log.outcomes[code] for code in log.outcome] == ["completed", "completed", "displaced", "completed"]
    report = figures(result, Objectives())
    assert (report["rejected"], report["rejected_by_reason"]) == (1, {"displaced": 1})


def test_a_prefix_cache_saves_prompt_tokens():
    document = {
        "num_requests": 20,
        "arrivals": {"kind": "constant", "rate": 0.1},
        "prompt": 20,
        "output": 2,
        "classes": [{"name": "chat", "shared_prefix": {"tokens": 16}}],
    }
    workload = parse_workload(document, "shared")
    runs = [Simulator(config(enable_prefix_caching=on), UnitCost(), workload.source()).run() for on in (False, True)]
    plain, cached = (figures(result, Objectives()) for result in runs)
    assert (plain["cached_tokens"], cached["cached_tokens"]) == (0, 19 * 16)
    # 20 tokens in chunks of 8 against 4 tokens.
    assert (plain["ttft_s"]["p50"], cached["ttft_s"]["p50"]) == (3.0, 1.0)


@pytest.mark.parametrize("batching", ["continuous", "static", "request_dynamic"])
@pytest.mark.parametrize("reservation", ["guaranteed", "exact", "expected", "optimistic"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_every_reservation_and_batching_comes_to_an_end(batching, reservation, ahead):
    settings = config(
        max_num_seqs=4,
        num_pages=25,
        max_queue_requests=20,
        batching=batching,
        reservation=reservation,
        preemption="recompute",
        priority_preemption=True,
        queue_displacement=True,
        enable_prefix_caching=ahead == 1,
        max_steps_ahead=ahead,
    )
    cost = CheckingCost()
    simulator = Simulator(settings, cost, mixed_workload(120).source())
    cost.scheduler = simulator.scheduler
    report = figures(simulator.run(), Objectives())
    assert simulator.scheduler.idle
    assert report["completed"] > 60
    counters = simulator.scheduler.counters
    assert (counters.completed, counters.num_rejected, counters.preemptions, counters.recomputed_tokens) == (
        report["completed"],
        report["rejected"],
        report["preemptions"],
        report["recomputed_tokens"],
    )


def test_an_empty_workload_ends_at_once():
    result = run()
    assert (result.termination, result.totals.iterations, len(result.log)) == ("all_terminal", 0, 0)
    assert not math.isnan(result.totals.ended_at)
    assert figures(result, Objectives())["tokens_per_s"] is None


@pytest.mark.parametrize("lag", [0, 1])
def test_several_steps_bring_the_same_tokens_and_save_dispatches(lag):
    """A step takes 1 s and a dispatch 1 s more; one request at a time."""
    cost = LinearCost(1.0, 0.0, 0.0, 0.0, 0.0, dispatch_s=1.0)
    document = {
        "num_requests": 40,
        "arrivals": {"kind": "constant", "rate": 0.005},
        "prompt": 8,
        "output": {"kind": "uniform", "low": 10, "high": 50},
        "max_tokens": 56,
    }

    def simulated(**changes):
        workload = parse_workload(document, "m/d/1")
        return Simulator(config(max_steps_ahead=lag, **changes), cost, workload.source(), keep_ids=True).run()

    single, several = simulated(), simulated(max_decode_steps=8, max_arrival_delay_s=1e6)
    assert several.log.num_output.tolist() == single.log.num_output.tolist()
    assert (several.termination, several.totals.steps) == ("all_terminal", pytest.approx(single.totals.steps, rel=0.1))
    assert several.totals.iterations < 0.4 * single.totals.iterations
    assert several.totals.busy_s < 0.75 * single.totals.busy_s


def test_the_bound_for_arrivals_shows_in_their_first_tokens():
    """With steps of 1 s, a request that comes at a bad moment waits so many seconds more."""
    long = arrival(0, 0.0, output=400)
    late = [arrival(1 + index, 40.3 + 7.37 * index, output=2) for index in range(20)]

    def waits(**changes):
        log = run(long, *late, max_model_len=512, num_pages=300, **changes).log
        return [log.started_at[index] - log.arrived_at[index] for index in range(1, 21)]

    assert max(waits()) <= 1.0
    for delay_s in (0.0, 2.0, 5.0):
        assert max(waits(max_decode_steps=16, max_arrival_delay_s=delay_s)) <= 1.0 + delay_s
    assert max(waits(max_decode_steps=16, max_arrival_delay_s=5.0)) > 3.0, "no arrival lost anything"
