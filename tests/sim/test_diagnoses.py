"""Each diagnosis is made of a run that has the illness and not of one that lacks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.config.flags import flags_of
from jaxserve.config.policy_config import GROWING_RESERVATIONS, RESERVATIONS
from jaxserve.core import Priority
from jaxserve.sim import diagnoses
from jaxserve.sim.diagnoses import CHECKS, Diagnosis, diagnose
from jaxserve.sim.iteration_cost import IterationCost
from jaxserve.sim.spread import Spread
from jaxserve.sim.trace_summary import TraceSummary
from tests.scheduler.harness import make_request
from tests.sim.clocked import Arrival, run, summary_of

ROOMY = SchedulerConfig(
    max_num_seqs=16, max_num_batched_tokens=256, prefill_chunk=256, num_pages=4097, max_model_len=4096
)

Examine = Callable[..., tuple[TraceSummary, dict[str, Diagnosis]]]


def every(seconds: float, count: int, prompt: int = 40, output: int = 20, **fields: Any) -> Iterator[Arrival]:
    """`count` alike requests, one each `seconds`."""
    for index in range(count):
        yield Arrival(seconds * index, make_request(f"r{index}", prompt, output, **fields))


@pytest.fixture(params=RESERVATIONS)
def reservation(request: pytest.FixtureRequest) -> str:
    """Each in turn."""
    return str(request.param)


@pytest.fixture
def examine(tmp_path: Path, reservation: str) -> Examine:
    """`examine(arrivals, config, ...)`: runs under `reservation`, and returns summary and diagnoses by name."""
    preemption = "recompute" if reservation in GROWING_RESERVATIONS else "pause"

    def examine(arrivals: Iterator[Arrival], config: SchedulerConfig = ROOMY, **settings: Any) -> Any:
        ordered = sorted(arrivals, key=lambda arrival: arrival.at)
        config = replace(config, reservation=reservation, preemption=preemption)
        summary = summary_of(run(ordered, tmp_path / "t", config, **settings))
        return summary, {diagnosis.name: diagnosis for diagnosis in diagnose(summary)}

    return examine


def test_a_run_with_room_for_all_is_healthy(examine: Examine) -> None:
    """Others' prompts, arrivals in the middle of a step and idle times are no illness."""
    summary, found = examine(every(0.0333, 200))
    assert list(found) == ["healthy"], found
    assert (summary.offered, summary.ended["completed"]) == (200, 200)
    figures = found["healthy"].figures
    assert 0.0 < figures["itl_p50_s"] < 0.02 and figures["ttft_p95_s"] < 0.05


def test_nothing_offered_is_no_data(tmp_path: Path) -> None:
    (diagnosis,) = diagnose(summary_of(run([], tmp_path / "t", ROOMY)))
    assert diagnosis.name == "no_data"


def test_too_few_slots_are_ttft_queueing(examine: Examine) -> None:
    config = replace(ROOMY, max_num_seqs=2)
    _, found = examine(every(0.05, 100), config)
    assert list(found) == ["ttft_queueing"]
    diagnosis = found["ttft_queueing"]
    assert diagnosis.figures["queue_share_of_slowest"] > 0.9 and "max_num_seqs" in diagnosis.flags
    _, found = examine(every(0.05, 100), replace(config, max_num_seqs=16))
    assert "ttft_queueing" not in found


def test_a_few_long_prompts_are_ttft_prefill(examine: Examine) -> None:
    def arrivals() -> Iterator[Arrival]:
        yield from every(0.2, 60, output=2)
        for index in range(6):
            yield Arrival(0.1 + 2.0 * index, make_request(f"long{index}", 2000, 2))

    _, found = examine(arrivals())
    assert list(found) == ["ttft_prefill"]
    assert found["ttft_prefill"].figures["queue_share_of_slowest"] < 0.1
    assert "prefill_chunk" in found["ttft_prefill"].flags
    _, found = examine(every(0.2, 60, output=2))
    assert list(found) == ["healthy"]


def test_bursts_that_fill_many_slots_are_an_oversized_decode_batch(examine: Examine) -> None:
    """Rows cost 2 ms here: alone an iteration takes 12 ms, with 32 rows 74 ms."""
    cost = IterationCost(0.010, 0.002, 0.00001)
    config = replace(ROOMY, max_num_seqs=32, max_num_batched_tokens=2048, prefill_chunk=2048)

    def arrivals() -> Iterator[Arrival]:
        for burst in range(5):
            for index in range(30):
                yield Arrival(20.0 * burst, make_request(f"b{burst}.{index}", 8, 10))
            yield Arrival(20.0 * burst + 0.001, make_request(f"lone{burst}", 8, 900))

    _, found = examine(arrivals(), config, cost=cost)
    assert "itl_decode_batch" in found and "itl_prefill" not in found and "itl_preemption" not in found
    diagnosis = found["itl_decode_batch"]
    assert diagnosis.figures["seconds_per_decode_row"] == pytest.approx(0.002, rel=0.05)
    assert diagnosis.flags == ("max_num_seqs",)
    _, found = examine(arrivals(), replace(config, max_num_seqs=4), cost=cost)
    assert "itl_decode_batch" not in found


def test_long_chunks_beside_decoding_are_itl_prefill(examine: Examine) -> None:
    def arrivals() -> Iterator[Arrival]:
        yield from every(0.1, 100, output=40)
        for index in range(20):
            yield Arrival(0.45 * index, make_request(f"long{index}", 3000, 2))

    config = replace(ROOMY, max_num_batched_tokens=1024, prefill_chunk=1024)
    _, found = examine(arrivals(), config)
    assert "itl_prefill" in found and "itl_decode_batch" not in found and "itl_preemption" not in found
    diagnosis = found["itl_prefill"]
    assert diagnosis.figures["seconds_per_prefill_token"] == pytest.approx(0.0001, rel=0.05)
    assert diagnosis.flags == ("itl_target_s", "prefill_chunk", "max_num_batched_tokens")
    _, found = examine(arrivals(), replace(config, prefill_chunk=64, max_num_batched_tokens=100))
    assert "itl_prefill" not in found


def test_lost_slots_are_itl_preemption(examine: Examine) -> None:
    config = replace(ROOMY, max_num_seqs=2, priority_preemption=True)

    def arrivals() -> Iterator[Arrival]:
        yield from every(1.5, 20, output=60, priority=Priority.LOW)
        for index in range(40):
            yield Arrival(0.3 + 0.75 * index, make_request(f"high{index}", 8, 20, priority=Priority.HIGH))
            yield Arrival(0.3 + 0.75 * index, make_request(f"also{index}", 8, 20, priority=Priority.HIGH))

    summary, found = examine(arrivals(), config)
    assert "itl_preemption" in found and "itl_decode_batch" not in found and "itl_prefill" not in found
    assert "kv_pressure" not in found and "no_refill" not in found
    assert found["itl_preemption"].figures["preemptions"] == summary.preemptions > 10
    assert "priority_preemption" in found["itl_preemption"].flags
    _, found = examine(arrivals(), replace(config, priority_preemption=False))
    assert "itl_preemption" not in found


def test_long_outputs_with_stable_first_tokens(examine: Examine) -> None:
    def arrivals() -> Iterator[Arrival]:
        for index in range(60):
            yield Arrival(0.2 * index, make_request(f"r{index}", 40, 300 if index % 10 == 0 else 10))

    _, found = examine(arrivals())
    assert list(found) == ["long_outputs"]
    assert found["long_outputs"].figures["output_tokens_p95"] == 300
    _, found = examine(every(0.2, 60, output=100))
    assert "long_outputs" not in found


def test_a_small_pool_is_kv_pressure(examine: Examine) -> None:
    """Each request sets aside 4 of 12 pages, so 3 of 16 slots are used."""
    config = replace(ROOMY, num_pages=13)
    summary, found = examine(every(0.05, 100), config)
    assert list(found) == ["kv_pressure", "ttft_queueing"]
    assert found["kv_pressure"].figures["iterations_blocked_on_pages"] > 0.8
    assert summary.not_refilled == 0.0
    assert "num_pages" in found["kv_pressure"].flags and "num_pages" in found["ttft_queueing"].flags
    _, found = examine(every(0.05, 100), replace(config, num_pages=400))
    assert "kv_pressure" not in found


def test_pages_that_run_out_under_long_outputs_are_kv_pressure(examine: Examine, reservation: str) -> None:
    """Each needs 11 pages at its end, of a pool of 40; only `optimistic` lets more in and takes them back."""
    config = replace(ROOMY, num_pages=41)
    summary, found = examine(every(0.01, 40, prompt=30, output=140), config)
    assert "kv_pressure" in found and "no_refill" not in found
    assert (summary.preemptions > 0) == (reservation == "optimistic")
    _, found = examine(every(0.01, 40, prompt=30, output=140), replace(config, num_pages=400))
    assert "kv_pressure" not in found and "no_refill" not in found


def test_a_static_batcher_does_not_refill(examine: Examine) -> None:
    def arrivals() -> Iterator[Arrival]:
        for index in range(60):
            yield Arrival(0.05 * index, make_request(f"r{index}", 40, 80 if index % 4 == 0 else 5))

    config = replace(ROOMY, max_num_seqs=4)
    summary, found = examine(arrivals(), replace(config, batching="static"))
    assert "no_refill" in found and "kv_pressure" not in found
    assert found["no_refill"].flags == ("batching",)
    assert found["no_refill"].figures["iterations_not_refilled"] > 0.5
    summary, found = examine(arrivals(), config)
    assert "no_refill" not in found and summary.not_refilled == 0.0


def test_slots_that_a_service_class_may_not_take_are_not_idle_by_fault(examine: Examine) -> None:
    config = replace(ROOMY, service_classes=(ServiceClass("bulk", max_slots=2),))
    summary, found = examine(every(0.01, 60, service_class="bulk"), config)
    assert found.keys() == {"ttft_queueing"} and summary.not_refilled == 0.0


def test_refusals_are_told_by_reason(examine: Examine) -> None:
    config = replace(ROOMY, max_num_seqs=1, max_queue_requests=2)

    def arrivals() -> Iterator[Arrival]:
        yield from every(0.05, 40, output=10)
        for index in range(30):
            yield Arrival(0.05 * index + 0.01, make_request(f"long{index}", 4000, 400))
        yield Arrival(0.0, make_request("late", 4, 4, deadline_at=0.001))

    summary, found = examine(arrivals(), config)
    diagnosis = found["rejections"]
    assert summary.rejected == {"never_fits": 30, "queue_full_requests": diagnosis.figures["queue_full_requests"]}
    assert diagnosis.figures["queue_full_requests"] >= 3 and summary.ended["expired"] == 1
    assert set(diagnosis.flags) >= {"max_queue_requests", "max_model_len"}
    _, found = examine(every(0.1, 40, output=10))
    assert "rejections" not in found


def test_expired_requests_count_as_lost(examine: Examine) -> None:
    def arrivals() -> Iterator[Arrival]:
        for index in range(20):
            yield Arrival(0.0, make_request(f"r{index}", 8, 50, deadline_at=1.0 + 0.001 * index))

    _, found = examine(arrivals(), replace(ROOMY, max_num_seqs=2))
    assert found["rejections"].figures["expired"] > 10 and "max_num_seqs" in found["rejections"].flags


def test_a_stall_without_work_is_not_blamed_on_the_scheduler(examine: Examine) -> None:
    """The host sleeps half a second in every twentieth iteration."""
    summary, found = examine(every(0.2, 60, output=30), pause_s=lambda plan: 0.5 * (plan.iteration % 20 == 19))
    assert "itl_tail" in found and not found.keys() & {"itl_decode_batch", "itl_prefill", "itl_preemption"}
    assert found["itl_tail"].figures["share_by_unexplained"] > 0.7
    assert found["itl_tail"].advice.startswith("Something outside the scheduler took the time")
    death, *others = diagnose(replace(summary, died_of="EngineStuckError: the engine made no step for 3.0 s"))
    assert death.says == "The engine died of EngineStuckError: the engine made no step for 3.0 s"
    (tail,) = (each for each in others if each.name == "itl_tail")
    assert tail.advice.startswith("What the engine died of may have taken the time")
    _, found = examine(every(0.2, 60, output=30))
    assert "itl_tail" not in found


def test_tokens_that_come_several_at_a_time_are_itl_steps(examine: Examine) -> None:
    arrivals = list(every(2.0, 30, output=100))
    _, found = examine(iter(arrivals), replace(ROOMY, max_decode_steps=8, max_arrival_delay_s=0.5))
    assert list(found) == ["itl_steps"], found
    assert found["itl_steps"].figures["itl_p50_s"] == pytest.approx(0.0101, rel=0.01)
    assert "max_decode_steps" in found["itl_steps"].flags
    _, found = examine(iter(arrivals), replace(ROOMY, max_decode_steps=8, max_arrival_delay_s=0.0))
    assert list(found) == ["healthy"], found


def test_of_a_server_several_steps_explain_long_gaps() -> None:
    spread = Spread(100, 0.001, 0.1, 0.1, 0.1)
    summary = TraceSummary("url", 10, 5, {}, {}, 0, itl_s=spread, decode_steps=4.0)
    assert [each.name for each in diagnose(summary)] == ["itl_steps"]
    assert [each.name for each in diagnose(replace(summary, decode_steps=1.0))] == ["itl_tail"]


def test_every_flag_that_is_advised_exists() -> None:
    known = {flag.name for flag in flags_of("server")}
    advised = {flag for flags in diagnoses._REJECTION_FLAGS.values() for flag in flags} | set(diagnoses._PAGE_FLAGS)
    advised |= {"max_num_seqs", "max_num_batched_tokens", "max_queue_requests", "prefill_chunk", "priority_preemption"}
    advised |= {"max_model_len", "trace_file", "batching", "itl_target_s"}
    assert advised <= known
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
