"""Replay: a recorded trace's arrivals, aborts and instants again, and whether the scheduler decides the same.

    report = replay(TraceReader("trace.jsonl"))
    report.difference          None when every record is equal

The scheduler is a pure function of its calls, so replay repeats them in the recorded interleaving (see
"Calls in their order" in `jaxserve.scheduler.trace`). Prompts are dummies of the recorded length, and the
device's answers are dummies too (`dummy_tokens`), but for one thing: a request that the trace says completed
in an update is given a stop id there, which ends it at that token, whatever ended it in the recording.

Every key but `bucket`, which no scheduler decides, is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Request, SamplingParams
from jaxserve.scheduler import Scheduler, StepPlan, StepResult
from jaxserve.scheduler.snapshot import restore_snapshot
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import (
    AbortEvent,
    AddEvent,
    BudgetEvent,
    EventsRecord,
    ExpireEvent,
    HoldEvent,
    IterationRecord,
    RecoverEvent,
    ReleaseEvent,
    ResetEvent,
    StarveEvent,
    TraceEvent,
)
from jaxserve.sim.dummy_tokens import STOP, DummyTokens

_NOT_COMPARED = ("bucket",)
ABSENT = "(absent)"
"""Stands for the value of a key or place that a record has not."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where replay and recording part.

    Attributes:
      line: of the record, in the trace file.
      iteration: of the record; None for one that holds events alone.
      key: of the record, with the place inside its value, as `events[2].outcome`.
    """

    line: int
    iteration: int | None
    key: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = "events between iterations" if self.iteration is None else f"iteration {self.iteration}"
        return f"{where} (line {self.line}), {self.key}: recorded {self.recorded!r}, replayed {self.replayed!r}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What was compared.

    Attributes:
      num_iterations: equal iteration records.
      num_requests: arrivals in equal records, the refused included.
      num_plans: plans made; those beyond `num_iterations` were in flight when the trace ended.
      difference: the first; None when all is equal.
      truncated_line: a last line that was cut short and not compared.
    """

    num_iterations: int
    num_requests: int
    num_plans: int
    difference: Difference | None
    truncated_line: int | None


def replay(
    reader: TraceReader,
    *,
    sink: Callable[[dict[str, Any]], None] | None = None,
    observe: Callable[[EventsRecord, StepPlan | None], None] | None = None,
) -> ReplayReport:
    """Replays a trace up to its end or the first difference.

    Args:
      sink: gets each replayed record, the one that differs included.
      observe: told of each equal record and, for an iteration's, its plan.

    Raises:
      ValueError: the trace is damaged.
    """
    config = reader.header.config
    snapshot = reader.header.snapshot
    live = [] if snapshot is None else [(name, pages) for name, pages in snapshot["live"]]
    replayer = Replayer(config, DummyTokens(config, reader, live), sink, snapshot)
    num_iterations = num_requests = 0
    difference = None
    for record in reader:
        difference = replayer.feed(record)
        if difference is not None:
            break
        num_requests += sum(isinstance(event, AddEvent) for event in record.events)
        num_iterations += isinstance(record, IterationRecord)
        if observe:
            observe(record, replayer.landed if isinstance(record, IterationRecord) else None)
    num_plans = replayer.num_plans - reader.header.first_iteration
    return ReplayReport(num_iterations, num_requests, num_plans, difference, reader.truncated_line)


class Replayer:
    """A fresh scheduler, fed with records in order.

    Args:
      config: the recorded scheduler's.
      tokens: of prompts and outputs.
      sink: gets each record of this scheduler.
      snapshot: state in which it begins.

    Attributes:
      landed: the plan of the last iteration record.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tokens: DummyTokens,
        sink: Callable[[dict[str, Any]], None] | None = None,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        self._tokens = tokens
        self._scheduler = Scheduler(config, trace=self._take)
        self._sink = sink
        self._replayed: deque[dict[str, Any]] = deque()  # records not compared yet
        self._expired: deque[str] = deque()  # by calls made, not seen among the events yet
        self._num_starved = 0  # calls made that took slots and gave no plan, not seen among the events yet
        self._in_flight: deque[StepPlan] = deque()
        self._num_updated = 0
        self.landed = StepPlan(0)
        if snapshot is not None:
            restore_snapshot(self._scheduler, snapshot, tokens)
            self._in_flight += [flight.plan for flight in self._scheduler._in_flight]
            self._num_updated = snapshot["iteration"]

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return self._scheduler.num_plans

    def feed(self, record: EventsRecord) -> Difference | None:
        """Repeats the calls that a record tells of and compares; nothing may be fed after a difference."""
        instants = (record.now, *record.in_flight) if isinstance(record, IterationRecord) else record.in_flight
        for call, known in _with_instants(record.events, instants):
            if not self._plan_until(call[0].num_plans, known):
                return self._no_plan(record)
            self._repeat(call)
        if not self._plan_until(self._num_updated + len(instants), instants):
            return self._no_plan(record)
        if isinstance(record, IterationRecord):
            if not self._in_flight:  # a snapshot counts more plans than it has
                return self._no_plan(record)
            self._update(record)
        elif not self._replayed:
            self._scheduler.flush_trace()
        replayed = self._replayed.popleft() if self._replayed else {}
        difference = _first_difference(record.data, replayed)
        return difference and Difference(record.line, record.data.get("iteration"), *difference)

    @property
    def _is_full(self) -> bool:
        """As many steps are in flight as there may be."""
        return len(self._in_flight) > self._scheduler.config.max_steps_ahead

    def _plan_until(self, count: int, instants: tuple[float, ...]) -> bool:
        """Makes plans up to `count`; `instants` begins with the oldest one not updated. False: nothing to plan."""
        return all(self._plan(instants[number - self._num_updated]) for number in range(self.num_plans, count))

    def _plan(self, now: float) -> bool:
        if self._is_full:  # only a damaged trace asks for more
            return False
        preemptions = self._scheduler.counters.preemptions
        plan = self._scheduler.schedule(now)
        self._num_starved += plan.empty and self._scheduler.counters.preemptions > preemptions
        self._expired += [event.request_id for event in self._scheduler.take_events()]
        if not plan.empty:
            self._in_flight.append(plan)
        return not plan.empty

    def _repeat(self, call: tuple[TraceEvent, ...]) -> None:
        event = call[0]
        match event:
            case AddEvent():
                requests = [_request(each, self._tokens) for each in call if isinstance(each, AddEvent)]
                self._scheduler.add_all(requests, event.now)
                self._scheduler.take_events()
            case AbortEvent() if event.reason is not FinishReason.DISPLACED:
                self._scheduler.abort(event.request_id, event.now, event.reason, forgets=event.forgets)
                self._scheduler.take_events()
            case ResetEvent():
                self._scheduler.reset_prefix_cache(event.now)
            case RecoverEvent():
                self._scheduler.recover(event.now, keeps_cache=event.keeps_cache)
                self._in_flight.clear()
            case HoldEvent():
                self._scheduler.hold(event.request_id, event.now)
            case ReleaseEvent():
                self._scheduler.release(event.request_id, event.now)
            case BudgetEvent():
                self._scheduler.limit_budget(event.num_tokens, event.now)
            case ExpireEvent():
                # One call of `schedule` may expire several and make a plan too.
                if not self._expired:
                    self._plan(event.now)
                if self._expired:
                    self._expired.popleft()
            case StarveEvent():
                if not self._num_starved:
                    self._plan(event.now)
                self._num_starved = max(self._num_starved - 1, 0)

    def _update(self, record: IterationRecord) -> None:
        plan = self.landed = self._in_flight.popleft()
        result = self._runs(plan, record) if plan.num_steps > 1 else self._tokens_of(plan, record)
        self._scheduler.update(plan, result, record.updated_at, bucket=record.data.get("bucket"))
        self._num_updated += 1

    def _tokens_of(self, plan: StepPlan, record: IterationRecord) -> StepResult:
        ending = frozenset(record.completed_in_update)
        ends = [
            (name, position + 1) for name, position in zip(plan.decode.request_ids, plan.decode.positions, strict=True)
        ]
        ends += [(chunk.request_id, chunk.start + len(chunk.token_ids)) for chunk in plan.prefill]
        tokens = [STOP if name in ending else self._tokens.at(name, index) for name, index in ends]
        return StepResult(tuple(tokens[: len(plan.decode)]), tuple(tokens[len(plan.decode) :]))

    def _runs(self, plan: StepPlan, record: IterationRecord) -> StepResult:
        """As many tokens of each row as were recorded; where the trace cannot be true, as many as were planned."""
        ending = frozenset(record.completed_in_update)
        counts = record.decode_tokens if len(record.decode_tokens) == len(plan.decode) else plan.decode.num_steps
        # Whoever has ended meanwhile may have brought fewer; so may one that ends now. Everybody else is complete.
        sequences = self._scheduler._in_flight[0].decode
        runs = []
        for row, sequence, recorded in zip(plan.decode, sequences, counts, strict=True):
            count = min(recorded, row.num_steps)
            ends_now = row.request_id in ending and sequence.finish_reason is None
            if sequence.finish_reason is None:
                count = max(count, 1) if ends_now else row.num_steps
            first = row.position + 1
            run = [self._tokens.at(row.request_id, index) for index in range(first, first + count)]
            runs.append((*run[:-1], STOP) if ends_now else tuple(run))
        return StepResult((), (), tuple(runs))

    def _take(self, replayed: dict[str, Any]) -> None:
        self._replayed.append(replayed)
        if self._sink:
            self._sink(replayed)

    def _no_plan(self, record: EventsRecord) -> Difference:
        number = self.num_plans
        planned = f"plan {number}" if number != record.data.get("iteration") else "a plan"
        why = "as many steps are in flight as there may be" if self._is_full else "no request holds a slot"
        return Difference(record.line, record.data.get("iteration"), "plan", planned, f"none: {why}")


def _calls(events: tuple[TraceEvent, ...]) -> Iterator[tuple[TraceEvent, ...]]:
    """The events by the call they came of: arrivals of one call together, every other alone."""
    first = 0
    while first < len(events):
        event = events[first]
        count = event.num_together if isinstance(event, AddEvent) else 1
        yield events[first : first + count]
        first += count


def _with_instants(
    events: tuple[TraceEvent, ...], instants: tuple[float, ...]
) -> Iterator[tuple[tuple[TraceEvent, ...], tuple[float, ...]]]:
    """Each call, with the instants of the plans from the oldest not updated on: a recovery tells of those it ends."""
    found = []
    for call in reversed(list(_calls(events))):
        if isinstance(call[0], RecoverEvent):
            instants = call[0].in_flight
        found.append((call, instants))
    return reversed(found)


def _request(event: AddEvent, tokens: DummyTokens) -> Request:
    return Request(
        event.request_id,
        tokens.prompt_of(event),
        SamplingParams(prompt_logprobs=0 if event.scores else None),
        eos_token_ids=(STOP,),
        max_tokens=event.max_tokens,
        priority=event.priority,
        deadline_at=event.deadline_at,
        tenant=event.tenant,
        service_class=event.service_class,
        free_running=event.free_running,
        num_imported_tokens=event.num_imported_tokens,
        exports_kv=event.exports,
        received_at=event.received_at,
    )


def _first_difference(recorded: dict[str, Any], replayed: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Key, recorded and replayed value of the first key in the record's order whose values differ."""
    for key in (*recorded, *(key for key in replayed if key not in recorded)):
        pair = recorded.get(key, ABSENT), replayed.get(key, ABSENT)
        if key not in _NOT_COMPARED and pair[0] != pair[1]:
            return _narrowed(key, *pair)
    return None


def _narrowed(key: str, recorded: Any, replayed: Any) -> tuple[str, Any, Any]:
    """The innermost place in which two values differ; short lists of ids are shown whole."""
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        inner = _first_difference(recorded, replayed)
        assert inner is not None, f"{key} is equal"
        return (f"{key}.{inner[0]}", *inner[1:])
    if isinstance(recorded, list) and isinstance(replayed, list):
        long = max(len(recorded), len(replayed)) > 8 or any(isinstance(item, dict) for item in (*recorded, *replayed))
        if long:
            for index in range(max(len(recorded), len(replayed))):
                items = [side[index] if index < len(side) else ABSENT for side in (recorded, replayed)]
                if items[0] != items[1]:
                    return _narrowed(f"{key}[{index}]", *items)
    return key, recorded, replayed
