"""Summarizer: from the records of a trace to its `TraceSummary`, in one pass.

It keeps what grows with requests and tokens as numbers only. A token's instant is the end of its iteration
(`jaxserve.sim.iteration_spans`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxserve.config import SchedulerConfig
from jaxserve.config.policy_config import GROWING_RESERVATIONS
from jaxserve.core import FinishReason
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import AbortEvent, AddEvent, EventsRecord, ExpireEvent, IterationRecord
from jaxserve.scheduler.waits_for import WaitsFor
from jaxserve.sim.iteration_cost import CostFit, IterationCost
from jaxserve.sim.iteration_spans import Span, Spans
from jaxserve.sim.spread import Spread, spread_of
from jaxserve.sim.trace_summary import STALL_CAUSES, TAIL, TraceSummary

_ENDS = ("completed", "aborted", "expired", "failed")
_EXPLAINED = 0.25
"""Least share of a stall that work has to account for to be its cause."""


@dataclass(frozen=True, slots=True, order=True)
class _Stall:
    """A gap between two tokens of a request, and the iteration in which it ended.

    `num_together`: tokens of the request that came at its end, of several decode steps.
    """

    seconds: float = 0.0
    num_together: int = 1
    preempted: bool = False
    num_rows: int = 0
    num_prefill: int = 0


@dataclass(slots=True)
class _Request:
    """A live request, and its longest gap with what went on in it."""

    event: AddEvent
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    preempted: bool = False  # since its last token
    stall: _Stall = field(default_factory=_Stall)


@dataclass(slots=True)
class _Sums:
    """What accumulates over a trace."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ENDS, 0))
    rejected: dict[str, int] = field(default_factory=dict)
    offered: int = 0
    preemptions: int = 0
    num_iterations: int = 0
    num_blocked: int = 0
    num_not_refilled: int = 0
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # TTFT, of which in the queue
    gaps: array[float] = field(default_factory=lambda: array("d"))
    paces: array[float] = field(default_factory=lambda: array("d"))  # gaps, shared out among the tokens at their ends
    stalls: list[_Stall] = field(default_factory=list)
    e2e: array[float] = field(default_factory=lambda: array("d"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    decode_rows: array[int] = field(default_factory=lambda: array("q"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("q"))


class Summarizer:
    """Takes in records in order.

    Args:
      config: of the recorded scheduler.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._spans = Spans()
        self._live: dict[str, _Request] = {}
        self._sums = _Sums()
        self._fit = CostFit()

    def feed(self, record: EventsRecord) -> None:
        """Takes in the next record."""
        self._events(record)
        if isinstance(record, IterationRecord):
            self._iteration(record, self._spans.of(record))

    def finish(self, source: str) -> TraceSummary:
        """The summary of what was fed."""
        for request in self._live.values():
            self._close(request)
        sums, cost = self._sums, self._fit.solve()
        itl, pace, iterations = spread_of(sums.gaps), spread_of(sums.paces), max(sums.num_iterations, 1)
        ttft = spread_of(total for total, _ in sums.first_tokens)
        rows, tokens = spread_of(sums.decode_rows), spread_of(sums.prefill_tokens)
        return TraceSummary(
            source=source,
            num_iterations=sums.num_iterations,
            offered=sums.offered,
            ended=sums.ended,
            rejected=sums.rejected,
            preemptions=sums.preemptions,
            max_num_seqs=self._config.max_num_seqs,
            ttft_s=ttft,
            queue_s=spread_of(queue for _, queue in sums.first_tokens),
            prefill_s=spread_of(total - queue for total, queue in sums.first_tokens),
            ttft_tail_queue_share=_queue_share(sums.first_tokens, ttft),
            itl_s=itl,
            pace_s=pace,
            stall_s=spread_of(stall.seconds for stall in sums.stalls),
            stall_causes=_stall_causes(sums.stalls, pace, rows, cost),
            e2e_s=spread_of(sums.e2e),
            output_tokens=spread_of(sums.outputs),
            decode_rows=rows,
            prefill_tokens=tokens,
            cost=cost,
            blocked_on_pages=sums.num_blocked / iterations,
            not_refilled=sums.num_not_refilled / iterations,
        )

    def _events(self, record: EventsRecord) -> None:
        """Arrivals and early ends; ids may be reused, so in order."""
        sums = self._sums
        for event in record.events:
            if isinstance(event, AbortEvent | ExpireEvent):
                reason = event.reason if isinstance(event, AbortEvent) else FinishReason.EXPIRED
                self._leave(event.request_id, completed_at=event.now if reason is FinishReason.STOP else None)
                if reason is FinishReason.DISPLACED:
                    self._reject(str(reason))
            if not isinstance(event, AddEvent):
                continue
            sums.offered += 1
            if event.accepted:
                self._live[event.request_id] = _Request(event)
            else:
                self._reject(event.outcome)
        for kind in _ENDS:
            sums.ended[kind] += len(getattr(record, kind))

    def _reject(self, reason: str) -> None:
        self._sums.rejected[reason] = self._sums.rejected.get(reason, 0) + 1

    def _iteration(self, record: IterationRecord, span: Span) -> None:
        sums = self._sums
        num_prefill = sum(tokens for _, tokens in record.prefill)
        sums.num_iterations += 1
        sums.preemptions += len(record.preempted)
        sums.decode_rows.extend([len(record.decode)] if record.decode else [])
        sums.prefill_tokens.extend([num_prefill] if num_prefill else [])
        num_steps = max(record.decode_tokens) if record.decode_steps > 1 else 1
        if num_steps:  # the mean one of several
            self._fit.add(sum(record.decode_tokens) / num_steps, num_prefill, span.duration_s / num_steps)
        for request_id in record.preempted:
            if request := self._of(request_id, record):
                request.preempted = True
        for request_id in (*(request_id for request_id, _ in record.prefill), *record.decode):
            request = self._of(request_id, record)
            if request and request.first_scheduled_at is None:
                request.first_scheduled_at = record.now
        self._count_idle_slots(record.front_waits_for)
        counts = (*record.decode_tokens, *(1 for _ in record.prefill_emitted))
        for request_id, count in zip((*record.decode, *record.prefill_emitted), counts, strict=True):
            if count and (request := self._of(request_id, record)):
                self._tokens(request, count, span.ended_at, len(record.decode), num_prefill)
        for request_id in record.completed_in_update:
            self._leave(request_id, completed_at=span.ended_at)

    def _of(self, request_id: str, record: IterationRecord) -> _Request | None:
        """The live request that a row belongs to; None when that one ended while the plan was in flight."""
        request = self._live.get(request_id)
        return request if request and request.event.num_plans <= record.iteration else None

    def _tokens(self, request: _Request, count: int, now: float, num_rows: int, num_prefill: int) -> None:
        """So many tokens of a request, together; only of a decode row they are several, and never its first."""
        request.num_tokens += count
        if request.first_token_at is None:
            request.first_token_at = now
            assert request.first_scheduled_at is not None, f"{request.event.request_id} has a token and no row"
            arrived_at = request.event.now
            self._sums.first_tokens.append((now - arrived_at, request.first_scheduled_at - arrived_at))
        else:
            gap = now - request.last_token_at
            self._sums.gaps.extend((gap, *(0.0,) * (count - 1)))
            self._sums.paces.extend((gap / count,) * count)
            request.stall = max(request.stall, _Stall(gap, count, request.preempted, num_rows, num_prefill))
        request.last_token_at, request.preempted = now, False

    def _count_idle_slots(self, waits_for: WaitsFor | None) -> None:
        """Counts an iteration that left a slot idle while somebody waited, by why."""
        # Where pages are promised one by one, it is for want of them that slots are taken away and left empty.
        for_pages = waits_for is WaitsFor.PREEMPTION and self._config.reservation in GROWING_RESERVATIONS
        self._sums.num_blocked += for_pages or waits_for is WaitsFor.PAGES
        self._sums.num_not_refilled += waits_for is WaitsFor.BATCH

    def _leave(self, request_id: str, completed_at: float | None) -> None:
        request = self._live.pop(request_id, None)
        if request is None:
            return
        self._close(request)
        if completed_at is not None:
            self._sums.e2e.append(completed_at - request.event.now)
            self._sums.outputs.append(request.num_tokens)

    def _close(self, request: _Request) -> None:
        if request.num_tokens > 1:
            self._sums.stalls.append(request.stall)


def summarize(reader: TraceReader, source: str) -> TraceSummary:
    """The summary of a trace file.

    Raises:
      ValueError: it is damaged.
    """
    return replace(summarize_records(reader, reader.header.config, source), died_of=reader.header.death)


def summarize_records(records: Iterable[EventsRecord], config: SchedulerConfig, source: str) -> TraceSummary:
    """The summary of `records`, made under `config`."""
    summarizer = Summarizer(config)
    for record in records:
        summarizer.feed(record)
    return summarizer.finish(source)


def _queue_share(first_tokens: list[tuple[float, float]], ttft: Spread | None) -> float | None:
    if ttft is None:
        return None
    tail = [(total, queue) for total, queue in first_tokens if total >= ttft.p95]
    whole = sum(total for total, _ in tail)
    return sum(queue for _, queue in tail) / whole if whole else 0.0


def _stall_causes(
    stalls: list[_Stall], pace: Spread | None, rows: Spread | None, cost: IterationCost
) -> dict[str, float] | None:
    """Shares, by cause, of the stalls in the tail."""
    if pace is None or rows is None:
        return None
    counts = dict.fromkeys(STALL_CAUSES, 0)
    for stall in stalls:
        if stall.seconds > TAIL * pace.p50:
            counts[_cause(stall, pace.p50, rows.p50, cost)] += 1
    total = max(sum(counts.values()), 1)
    return {cause: count / total for cause, count in counts.items()}


def _cause(stall: _Stall, usual_s: float, usual_rows: float, cost: IterationCost) -> str:
    """Preemption, or what the iteration had so much more of than others that it accounts for the stall."""
    if stall.preempted:
        return "preemption"
    if stall.num_together > 1 and stall.seconds <= TAIL * usual_s * stall.num_together:
        return "steps"
    by_rows, by_tokens = cost.per_row_s * (stall.num_rows - usual_rows), cost.per_token_s * stall.num_prefill
    if max(by_rows, by_tokens) < _EXPLAINED * (stall.seconds - usual_s):
        return "unexplained"
    return "decode" if by_rows > by_tokens else "prefill"
