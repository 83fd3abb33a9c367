"""What holds whatever comes: random arrivals, aborts, deadlines and steps, with 0 to 2 plans in flight.

The harness checks plans, invariants and the fake device's memory at every move; here is what holds at
the end: everyone admitted has ended, with the tokens it has to have, and nothing is left.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.config.policy_config import (
    BATCHINGS,
    GROWING_RESERVATIONS,
    POLICIES,
    PREEMPTIONS,
    RESERVATIONS,
    SWAPPING_PREEMPTIONS,
    VICTIMS,
)
from jaxserve.core import FinishReason, Request, SamplingParams
from tests.scheduler.harness import STOP_ID, Harness, make_config, make_request

WINDOWS = ((0,), (0,), (1,), (3,), (4,), (6,), (11,), (0, 4), (0, 6, 6), (1, 3), (11, 3), (4, 4), (0, 0, 5), (7, 0, 2))
"""Of each group of layers."""
CLASSES = (ServiceClass("bulk", max_slots=1, max_queue_requests=2, max_queue_tokens=60, itl_target_s=1.0),)


def sample(request_id: str, position: int) -> int:
    """Some token; STOP_ID at about every ninth position, differently per request."""
    value = (position * 2654435761 + int(request_id[1:]) * 40503) % 1000
    return STOP_ID if value % 9 == 0 else value


def expected_output(request: Request) -> list[int]:
    """What `request` emits when it runs undisturbed to its end."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(sample(request.request_id, request.num_prompt_tokens + len(output)))
        if output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            break
    return output


def pages_to_export(request: Request, config: SchedulerConfig) -> set[tuple[int, int]]:
    """Of each group the prompt's full pages that hold a token which the one after the prompt sees."""
    if not request.exports_kv:
        return set()
    length, size = request.num_prompt_tokens, config.page_size
    return {
        (group, index)
        for group, window in enumerate(config.windows)
        for index in range(length // size)
        if not window or (index + 1) * size > length + 1 - window
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Random events on a small engine: limits are tight, so queueing, refusal and preemption are common."""

    @initialize(
        lag=st.integers(0, 2),
        slots=st.integers(1, 4),
        budget=st.integers(4, 12),
        chunk=st.integers(1, 9),
        prefills=st.integers(1, 4),
        pages=st.integers(4, 40),
        windows=st.sampled_from(WINDOWS),
        host_pages=st.integers(1, 20),
        queue=st.integers(0, 6),
        queue_tokens=st.sampled_from([30, 90, 1000]),
        preemption=st.booleans(),
        claims=st.booleans(),
        policies=st.fixed_dictionaries(
            {
                "policy": st.sampled_from(POLICIES),
                "reservation": st.sampled_from(RESERVATIONS),
                "preemption": st.sampled_from(PREEMPTIONS),
                "victim": st.sampled_from(VICTIMS),
                "max_preemptions": st.integers(1, 3),
                "batching": st.sampled_from(BATCHINGS),
                "batch_timeout_s": st.sampled_from([0.5, 4.0]),
                "enable_prefix_caching": st.booleans(),
                "queue_displacement": st.booleans(),
                "long_prefill_token_threshold": st.sampled_from([0, 6]),
                "max_long_prefills": st.integers(1, 2),
                "itl_target_s": st.sampled_from([None, 0.5, 1.5]),
                "service_classes": st.sampled_from([(), CLASSES]),
                "max_decode_steps": st.sampled_from([1, 2, 7]),
                "max_arrival_delay_s": st.sampled_from([0.0, 2.5, 1e6]),
            }
        ),
    )
    def start(
        self,
        lag: int,
        slots: int,
        budget: int,
        chunk: int,
        prefills: int,
        pages: int,
        windows: tuple[int, ...],
        host_pages: int,
        queue: int,
        queue_tokens: int,
        preemption: bool,
        claims: bool,
        policies: dict[str, Any],
    ) -> None:
        if policies["reservation"] in GROWING_RESERVATIONS and policies["preemption"] == "pause":
            policies["preemption"] = "recompute"
        policies["num_host_pages"] = host_pages if policies["preemption"] in SWAPPING_PREEMPTIONS else 0
        self.harness = Harness(
            make_config(
                max_num_seqs=slots,
                max_num_batched_tokens=budget,
                prefill_chunk=chunk,
                max_prefill_seqs=prefills,
                num_pages=pages,
                sliding_window=windows[0] if len(windows) == 1 else 0,
                group_windows=windows if len(windows) > 1 else (),
                max_queue_requests=queue,
                max_queue_tokens=queue_tokens,
                priority_preemption=preemption,
                arrivals_claim_slots=claims,
                **policies,
            ),
            lag,
            sample,
        )
        if policies["max_decode_steps"] > 1:
            self.harness.measure()
        self.admitted: dict[str, Request] = {}
        self.offered = 0

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(0, 12),
        priority=st.integers(-1, 1),
        patience=st.none() | st.floats(-1.0, 30.0),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["", "a", "b"]),
        named=st.booleans(),
        bound=st.sampled_from([False, False, True]),
        imported=st.sampled_from([0, 0, 0, 1, 2, 7]),
        exports=st.sampled_from([False, False, True]),
    )
    def arrive(
        self,
        prompt: int,
        output: int,
        priority: int,
        patience: float | None,
        min_tokens: int,
        ignore_eos: bool,
        tenant: str,
        named: bool,
        bound: bool,
        imported: int,
        exports: bool,
    ) -> None:
        has_classes = bool(self.harness.config.service_classes)
        params = SamplingParams(max_tokens=None, min_tokens=min_tokens, ignore_eos=ignore_eos)
        request = make_request(
            f"r{self.offered}",
            prompt,
            output,
            priority=priority,
            params=params,
            eos_token_ids=(STOP_ID,),
            deadline_at=None if patience is None else self.harness.now + patience,
            tenant=tenant,
            service_class=CLASSES[0].name if named and has_classes else "",
            free_running=not bound,
            num_imported_tokens=min(imported, (prompt - 1) // 4) * 4,
            exports_kv=exports,
        )
        self.offered += 1
        (rejection,) = self.harness.add(request)
        if rejection is None:
            self.admitted[request.request_id] = request

    @rule(which=st.integers(0, 1000), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def abort(self, which: int, reason: FinishReason) -> None:
        ids = list(self.admitted)
        if ids:
            request_id = ids[which % len(ids)]
            live = request_id not in self.harness.ends
            assert self.harness.abort(request_id, reason=reason) == live
            assert not self.harness.abort(request_id)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "harness"):
            return
        scheduler, counters = self.harness.scheduler, self.harness.scheduler.counters
        assert counters.offered == self.offered
        assert scheduler.num_running + scheduler.num_waiting == len(self.admitted) - len(self.harness.ends)
        displaced = list(self.harness.ends.values()).count(FinishReason.DISPLACED)
        assert counters.num_rejected == self.offered - len(self.admitted) + displaced

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.run()
        scheduler = harness.scheduler
        assert set(harness.ends) == set(self.admitted)
        for request_id, request in self.admitted.items():
            whole, output = expected_output(request), harness.outputs[request_id]
            if harness.ends[request_id] in ("stop", "length"):
                assert output == whole
                assert harness.exported_pages(request_id) == pages_to_export(request, harness.config)
            else:
                assert output == whole[: len(output)]
        assert scheduler.pages_free + scheduler.pages_cached == harness.config.num_pages - 1
        assert harness.config.enable_prefix_caching or not scheduler.pages_cached
        assert scheduler.num_free_slots == harness.config.max_num_seqs
        assert (scheduler.num_waiting, scheduler.num_waiting_tokens, scheduler.take_events()) == (0, 0, [])


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=400, stateful_step_count=30)
