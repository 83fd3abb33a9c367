"""A scheduler with a fake device: tokens that can be computed by hand, and any number of steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import GROWING_RESERVATIONS, PREEMPTIONS, RESERVATIONS
from jaxserve.core import Rejection, Request, SamplingParams
from jaxserve.scheduler import Scheduler, StepPlan, StepResult, TokenEvent
from jaxserve.scheduler.step_time import StepTimeModel
from tests.scheduler.fake_device import Content, FakeDevice, Memory

STOP_ID = 1007
PAGES = [
    (reservation, preemption)
    for reservation in RESERVATIONS
    for preemption in PREEMPTIONS
    if preemption != "pause" or reservation not in GROWING_RESERVATIONS
]
"""Every reservation with every preemption that it may have."""


def make_config(**changes: Any) -> SchedulerConfig:
    """Small limits: 4 slots, budget 16, chunk 8, 4-token pages, 64-token context, ample pages."""
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk": 8,
        "page_size": 4,
        "num_pages": 257,
        "max_model_len": 64,
        "max_queue_requests": 8,
    }
    return SchedulerConfig(**(settings | changes))


def make_request(request_id: str, prompt: int = 4, output: int = 4, **fields: Any) -> Request:
    """A free-running request of `prompt` tokens 100, 101, ... that may emit `output` tokens."""
    fields = {"free_running": True} | fields
    return Request(request_id, tuple(range(100, 100 + prompt)), max_tokens=output, **fields)


def stopping_request(request_id: str, prompt: int = 4, output: int = 8, *, min_tokens: int = 0) -> Request:
    """A request that ends at STOP_ID."""
    params = SamplingParams(max_tokens=output, min_tokens=min_tokens)
    return make_request(request_id, prompt, output, params=params, eos_token_ids=(STOP_ID,))


class Harness:
    """Runs a scheduler; each call of `step` plans one iteration, and collects the one planned `lag` steps before.

    Every plan is checked against the limits, every state against the invariants, and every token event
    against what the fake device answered. Time is the number of calls of `step`.

    Args:
      config: limits.
      lag: plans kept in flight, 0 or more.
      sample: token of (request id, position); the position by default.
    """

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        lag: int = 0,
        sample: Callable[[str, int], int] = lambda request_id, position: position,
    ) -> None:
        self.config = replace(config or make_config(), max_steps_ahead=lag)
        self.records: list[dict[str, Any]] = []
        self.scheduler = Scheduler(self.config, trace=self.records.append)
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.now = 0.0
        self._lag = lag
        self._sample = sample
        self._chains: dict[int, list[tuple[int, int]]] = {}  # by arrival: hash of all tokens so far, token
        self._device = FakeDevice(self.config, sample)
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._before: deque[Memory] = deque()  # of each plan in flight, what the device held when it was made

    def measure(self, step_s: float = 1.0) -> None:
        """Makes the scheduler believe that steps take about `step_s`, so that it may plan several at once."""
        for number in range(StepTimeModel.MIN_STEPS):
            self.scheduler._step_time.observe(1 + number % 2, number, step_s * (1.0 + 1e-3 * number))

    def add(self, *requests: Request) -> list[Rejection | None]:
        """Adds requests in order."""
        answers = []
        for request in requests:
            answers.append(self.scheduler.add(request, self.now))
            self._take(self.scheduler.take_events())
            if answers[-1] is None:
                self._begin(request)
        self.scheduler.check_invariants()
        return answers

    def add_all(self, requests: list[Request]) -> Rejection | None:
        """Adds requests in one call; when they are refused, nobody may have lost anything to them."""
        before = self._places()
        rejection = self.scheduler.add_all(requests, self.now)
        self._take(self.scheduler.take_events())
        if rejection is None:
            for request in requests:
                self._begin(request)
                assert request.request_id in self.scheduler.live_ids
        else:
            assert self._places() == before, f"{[request.request_id for request in requests]} were refused at a price"
        self.scheduler.check_invariants()
        return rejection

    def _begin(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.ends.pop(request.request_id, None)
        self._device.forget(request.request_id)

    def exported_pages(self, request_id: str) -> set[tuple[int, int]]:
        """Group and number of the pages that a request's plans have copied out."""
        return {(group, index) for name, group, index in self._device.exported if name == request_id}

    def _places(self) -> tuple[Any, ...]:
        """Who is where, and what has been lost and found so far."""
        scheduler = self.scheduler
        counters = scheduler.counters
        return (
            (scheduler.live_ids, scheduler.active_ids, scheduler.waiting_ids, scheduler.num_waiting_tokens),
            (scheduler.pages_free, scheduler.pages_cached, scheduler.pages_owned, scheduler._reservation.num_promised),
            (counters.preemptions, counters.cached_tokens, counters.rejected.get("displaced", 0), dict(self.ends)),
        )

    def abort(self, request_id: str, **reason: Any) -> bool:
        """Aborts and takes in the event."""
        ended = self.scheduler.abort(request_id, self.now, **reason)
        self._take(self.scheduler.take_events())
        self.scheduler.check_invariants()
        return ended

    def step(self) -> StepPlan:
        """Plans an iteration; then takes in results until at most `lag` plans are in flight.

        With nothing to plan the oldest plan in flight is taken in.
        """
        plan = self.plan()
        self._land_until(self._lag if not plan.empty else max(len(self._in_flight) - 1, 0))
        self.now += 1.0
        return plan

    def plan(self) -> StepPlan:
        """Plans an iteration and takes in no result but those it must have; time stands still."""
        self._land_until(self._lag)
        plan = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_events())
        self._check_plan(plan)
        self.scheduler.check_invariants()
        if not plan.empty:
            self.plans.append(plan)
            self._before.append(self._device.memory)
            self._in_flight.append((plan, self._device.run(plan, self._content, self._has_ended)))
        return plan

    def fail(self, *, keeps_pool: bool) -> list[str]:
        """A step fails: whatever is in flight never happened, or the pool is lost too.

        Returns:
          The live requests that had rows in flight.
        """
        if self._before and keeps_pool:
            self._device.memory = self._before[0]
        elif not keeps_pool:
            self._device.memory = ({}, {})
        self._in_flight.clear()
        self._before.clear()
        before = self.scheduler.live_ids
        flights = self.scheduler.recover(self.now, keeps_cache=keeps_pool)
        self.scheduler.check_invariants()
        assert self.scheduler.live_ids == before and not self.scheduler.take_events()
        assert not self.scheduler.active_ids and not self.scheduler.num_in_flight
        assert self.scheduler.pages_owned == self.scheduler._reservation.num_promised == 0
        self.plans = self.plans[: self.scheduler.num_plans]
        found = dict.fromkeys(each for flight in flights for each in (*flight.decode, *flight.prefill))
        return [each.request_id for each in found if each.finish_reason is None]

    def run(self, limit: int = 10_000) -> None:
        """Steps until nothing is live or in flight."""
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"still live after {limit} steps: {self.scheduler.live_ids}")

    def _content(self, request_id: str, position: int) -> Content:
        """Whose it is, or who may share it, and all tokens up to it."""
        sequence = self.scheduler.sequence(request_id)
        request = sequence.request
        shares = (request.tenant, request.cache_salt) if self.config.enable_prefix_caching else sequence.arrival
        chain = self._chains.setdefault(sequence.arrival, [])
        prompt = request.prompt_token_ids
        for at in range(len(chain), position + 1):
            token = prompt[at] if at < len(prompt) else self._sample(request_id, at)
            chain.append((hash((chain[-1] if chain else 0, token)), token))
        return (shares, *chain[position])

    def _has_ended(self, request_id: str, position: int) -> bool:
        """Whether the token at `position`, or one before it, is one that ends the request."""
        request = self.scheduler.sequence(request_id).request
        first = request.num_prompt_tokens + request.params.min_tokens
        return any(self._sample(request_id, at) in request.stop_ids for at in range(first, position + 1))

    def _land_until(self, count: int) -> None:
        """Takes in the oldest results until `count` plans are in flight."""
        while len(self._in_flight) > count:
            self._before.popleft()
            self._land(*self._in_flight.popleft())

    def _land(self, plan: StepPlan, result: StepResult) -> None:
        events = self.scheduler.update(plan, result, self.now)
        for event in events:
            if event.token_id is not None:
                rows = plan.decode if event.source == "decode" else plan.prefill
                assert rows[event.row].request_id == event.request_id
                if event.source == "decode" and plan.num_steps > 1:
                    assert event.token_id in result.decode_runs[event.row]
                else:
                    tokens = result.decode_tokens if event.source == "decode" else result.prefill_tokens
                    assert tokens[event.row] == event.token_id
        self._take(events)
        self.scheduler.check_invariants()

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event.request_id} speaks after its end"
            if event.token_id is not None:
                self.outputs[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason
        self.events += events

    @staticmethod
    def _ids_of(plan: StepPlan) -> list[str]:
        return [*plan.decode.request_ids, *(chunk.request_id for chunk in plan.prefill)]

    def _check_plan(self, plan: StepPlan) -> None:
        config, scheduler = self.config, self.scheduler
        assert 1 <= plan.num_steps <= config.max_decode_steps
        if plan.num_steps > 1:
            assert not plan.prefill and not plan.swaps and not plan.preempted
            # Whoever waits wants a slot, and no row leaves its own before the plan's last step.
            assert not scheduler.num_waiting or min(plan.decode.num_steps) == plan.num_steps
            assert plan.num_steps == max(plan.decode.num_steps) and min(plan.decode.num_steps) >= 1
            assert all(scheduler.sequence(row.request_id).request.free_running for row in plan.decode)
        assert plan.num_tokens <= max(self.scheduler.token_budget, len(plan.decode))
        assert not scheduler.held_ids or set(scheduler.held_ids).isdisjoint(self._ids_of(plan))
        assert len(plan.prefill) <= config.max_prefill_seqs
        assert all(1 <= len(chunk.token_ids) <= config.prefill_chunk for chunk in plan.prefill)
        slots = [row.slot for row in plan.decode] + [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots)
        assert plan.empty == (not slots)
        # With pages promised one by one, those that go without may be all, until a step in flight has landed.
        may_starve = config.reservation in GROWING_RESERVATIONS
        if plan.empty and not (may_starve and self._in_flight):
            assert scheduler.num_free_slots == config.max_num_seqs
        # A prompt token is only computed once every decode-ready slot has its row.
        left_out = (
            set(scheduler.active_ids) - {r.request_id for r in plan.decode} - {c.request_id for c in plan.prefill}
        )
        for request_id in left_out:
            sequence = scheduler.sequence(request_id)
            lacks_page = sequence.num_pages * config.page_size == sequence.num_scheduled
            assert not sequence.decode_ready or (may_starve and lacks_page), f"{request_id} got no token"
