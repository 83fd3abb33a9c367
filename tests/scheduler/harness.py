"""A scheduler with a fake device: tokens that can be computed by hand, and any number of steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import Rejection, Request, SamplingParams
from jaxserve.scheduler import Scheduler, StepPlan, StepResult, TokenEvent

STOP_ID = 7


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
    """A request of `prompt` tokens 100, 101, ... that may emit `output` tokens."""
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
      sample: token of (request id, position); 0 by default.
    """

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        lag: int = 0,
        sample: Callable[[str, int], int] = lambda request_id, position: 0,
    ) -> None:
        self.config = config or make_config()
        self.records: list[dict[str, Any]] = []
        self.scheduler = Scheduler(self.config, trace=self.records.append)
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.now = 0.0
        self._lag = lag
        self._sample = sample
        self._in_flight: deque[StepPlan] = deque()

    def add(self, *requests: Request) -> list[Rejection | None]:
        """Adds requests in order."""
        answers = []
        for request in requests:
            answers.append(self.scheduler.add(request, self.now))
            if answers[-1] is None:
                self.outputs[request.request_id] = []
                self.ends.pop(request.request_id, None)
        self.scheduler.check_invariants()
        return answers

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
        plan = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_events())
        self._check_plan(plan)
        self.scheduler.check_invariants()
        if not plan.empty:
            self.plans.append(plan)
            self._in_flight.append(plan)
        keep = self._lag if not plan.empty else max(len(self._in_flight) - 1, 0)
        while len(self._in_flight) > keep:
            self._land(self._in_flight.popleft())
        self.now += 1.0
        return plan

    def run(self, limit: int = 10_000) -> None:
        """Steps until nothing is live or in flight."""
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"still live after {limit} steps: {self.scheduler.live_ids}")

    def _land(self, plan: StepPlan) -> None:
        result = StepResult(
            decode_tokens=tuple(self._sample(row.request_id, row.position + 1) for row in plan.decode),
            prefill_tokens=tuple(
                self._sample(chunk.request_id, chunk.start + len(chunk.token_ids)) for chunk in plan.prefill
            ),
        )
        events = self.scheduler.update(plan, result, self.now)
        for event in events:
            if event.token_id is not None:
                rows = plan.decode if event.source == "decode" else plan.prefill
                tokens = result.decode_tokens if event.source == "decode" else result.prefill_tokens
                assert rows[event.row].request_id == event.request_id
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

    def _check_plan(self, plan: StepPlan) -> None:
        config, scheduler = self.config, self.scheduler
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.prefill) <= config.max_prefill_seqs
        assert all(1 <= len(chunk.token_ids) <= config.prefill_chunk for chunk in plan.prefill)
        slots = [row.slot for row in plan.decode] + [chunk.slot for chunk in plan.prefill]
        assert len(set(slots)) == len(slots)
        assert plan.empty == (not slots)
        if plan.empty:
            assert scheduler.num_free_slots == config.max_num_seqs
        # A prompt token is only computed once every decode-ready slot has its row.
        left_out = (
            set(scheduler.active_ids) - {r.request_id for r in plan.decode} - {c.request_id for c in plan.prefill}
        )
        for request_id in left_out:
            assert not scheduler.sequence(request_id).decode_ready, f"{request_id} got no token"
