"""What a trace holds, as types: the header, what came in, and the iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason
from jaxserve.scheduler.waits_for import WaitsFor


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What was recorded: the model's name and the scheduler's settings.

    Attributes:
      snapshot: the state in which the trace begins, of one that an engine left when it died; None: a fresh one.
      died_of: of such an engine; "" of others.
    """

    model: str
    config: SchedulerConfig
    snapshot: dict[str, Any] | None = None
    died_of: str = ""

    @property
    def death(self) -> str:
        """The first line of `died_of`."""
        return self.died_of.split("\n", 1)[0]

    @property
    def first_iteration(self) -> int:
        """Number of the first iteration."""
        return 0 if self.snapshot is None else int(self.snapshot["iteration"])


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that came in.

    Attributes:
      num_plans, num_updated: plans made and updated when it came.
      pages: with a prefix cache, numbers of the prompt's full pages, or of those filled since the record before.
    """

    request_id: str
    now: float
    num_plans: int
    num_updated: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AddEvent(TraceEvent):
    """An arrival.

    Attributes:
      outcome: "slot", "queue" or the rejection's reason.
      scores: it shares no cached pages.
      free_running: no token of it waits for the host.
      num_imported_tokens: of the prompt, that came with it; received_at: instant at which it was asked for.
      exports: its pages are copied out.
      num_together: arrivals of one call, of which this is the first; the others follow it and say 1.
    """

    num_prompt_tokens: int
    max_tokens: int
    priority: int
    tenant: str
    service_class: str
    deadline_at: float | None
    outcome: str
    scores: bool
    free_running: bool = False
    num_together: int = 1
    num_imported_tokens: int = 0
    exports: bool = False
    received_at: float | None = None

    @property
    def accepted(self) -> bool:
        """It was placed or queued."""
        return self.outcome in ("slot", "queue")


@dataclass(frozen=True, slots=True)
class AbortEvent(TraceEvent):
    """A live request was ended by a call; STOP is a completion by a stop string, DISPLACED the work of an arrival.

    `forgets`: its pages were taken out of the prefix cache.
    """

    reason: FinishReason
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class ExpireEvent(TraceEvent):
    """A deadline passed; seen when `schedule` began."""


@dataclass(frozen=True, slots=True)
class StarveEvent(TraceEvent):
    """A call of `schedule` took slots for want of pages and made no plan; it has no request."""


@dataclass(frozen=True, slots=True)
class ResetEvent(TraceEvent):
    """The prefix cache was emptied; it has no request."""


@dataclass(frozen=True, slots=True)
class RecoverEvent(TraceEvent):
    """A step failed: the plans in flight were taken back.

    Attributes:
      keeps_cache: the prefix cache was kept.
      in_flight: instants of those plans, oldest first; `num_plans` counts them.
    """

    keeps_cache: bool
    in_flight: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HoldEvent(TraceEvent):
    """A request that waits may not run until it is released."""


@dataclass(frozen=True, slots=True)
class ReleaseEvent(TraceEvent):
    """A held request may run again."""


@dataclass(frozen=True, slots=True)
class BudgetEvent(TraceEvent):
    """From now on a plan has at most `num_tokens` tokens; it has no request."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class EventsRecord:
    """What came in since the record before.

    Attributes:
      line: its number in the file, from 1.
      data: as written, for comparison.
      in_flight: instants of the plans made and not updated, oldest first.
      rejected, completed, aborted, expired, failed: ids, in order.
    """

    line: int
    data: dict[str, Any]
    events: tuple[TraceEvent, ...]
    in_flight: tuple[float, ...]
    rejected: tuple[str, ...]
    completed: tuple[str, ...]
    aborted: tuple[str, ...]
    expired: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IterationRecord(EventsRecord):
    """One iteration; the keys are those of `jaxserve.scheduler.trace`.

    `decode_tokens` has a count per decode row, 1 where the trace does not tell.
    """

    iteration: int
    now: float
    decode: tuple[str, ...]
    decode_steps: int
    decode_tokens: tuple[int, ...]
    prefill: tuple[tuple[str, int], ...]
    prefill_emitted: tuple[str, ...]
    preempted: tuple[str, ...]
    queue: tuple[str, ...]
    active: tuple[str, ...]
    unused_budget: int
    pages_free: int
    pages_cached: int
    pages_owned: int
    front_waits_for: WaitsFor | None
    updated_at: float
    preempted_next: tuple[str, ...]
    named: tuple[tuple[str, tuple[int, ...]], ...]
    imported: tuple[tuple[str, int], ...] = ()
    exported: tuple[tuple[str, int], ...] = ()

    @property
    def completed_in_update(self) -> tuple[str, ...]:
        """Ids that ended by a token of this iteration, or with it when they asked for none."""
        stops = sum(isinstance(event, AbortEvent) and event.reason is FinishReason.STOP for event in self.events)
        return self.completed[stops:]
