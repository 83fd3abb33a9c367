"""The iteration trace: what the scheduler decided, one JSON-able record per iteration.

A record holds the decisions of one plan and, in `events`, what came in since the record before: enough
to feed the same arrivals to another scheduler and compare its plans (`python -m jaxserve.replay`). It
holds lengths, never tokens or texts. Keys:

| key | meaning |
|---|---|
| iteration, now | number of the plan; instant it was made |
| decode, prefill, prefill_emitted | ids; [id, tokens] pairs; ids whose prompt ended with a token |
| decode_steps | decode steps of the plan; only where plans may have several, like the next |
| decode_tokens | tokens that each row of `decode` brought; its request's end may be before the steps' |
| preempted | ids that lost their slot since the plan before |
| swapped_out, swapped_in | [id, pages] pairs of the plan, in order; only with a host pool, like the next |
| host_pages_free | of the host pool, after the iteration |
| rejected, completed, aborted, expired, failed | ids, since the record before, in order |
| queue, active | ids after the iteration: waiting, and holding a slot, in promotion order |
| unused_budget | token budget less tokens |
| pages_free, pages_cached, pages_owned | after the iteration |
| front_waits_for | what the queue's front lacked when the plan was made (`WaitsFor`); None when nobody waited |
| bucket | the compiled shape it ran in; None in simulation |
| in_flight | instants of the plans made and not yet updated, oldest first, once this one is updated |
| updated_at | instant of the update |
| preempted_next | ids that lost their slot since the last plan made: the next one's `preempted`, so far |
| events | arrivals and early ends since the record before |

Between iterations events may pile up: on an idle engine, or one that refuses many. After `MAX_EVENTS` of
them, and at a flush, comes a record of `kind` "events": `events`, `in_flight` and the lists of ids that
ended or were rejected since the record before, and nothing of a plan. An iteration's record has no `kind`.

Where K/V comes from another engine or goes to one, `imported` and `exported` of an iteration are [id, pages] pairs. An
"add" then has `imports`, tokens of its prompt that came with it, and `received_at`, the instant at which it was asked
for, null where nobody said; or `exports`.

An event has `kind` ("add", "abort", "expire", "starve", "reset_prefix_cache", "recover", "hold", "release", "budget"),
`id` (empty where it is of no one request), `now` and `step`, the pair (plans made, plans updated) when it came: with
steps in flight this places it exactly. An "add" also has `prompt` (tokens), `max_tokens`, `priority`, `tenant`,
`service_class`, `deadline_at` and `outcome`: "slot", "queue" or the rejection's reason. An "abort" has `reason`; one
with reason "displaced" is the work of the "add" that follows it, not a call of its own. One that has `forgets` took the
request's pages out of the prefix cache. Of several arrivals of one call the first has `together`, their number; the
others follow it at once, in the same record. A "starve" is a call of `schedule` that took slots for want of pages and
made no plan, as all that kept a slot lacked a page too.

With a prefix cache three keys more say which pages are alike, by numbers (`page_ordinals`): `pages` of an
"add", the numbers of its prompt's full pages; `named` of an iteration, [id, numbers] pairs, and of an event
that ends a request, numbers, for the pages filled since. An "add" also has `scores`: it wants its prompt
scored and therefore computed, so it shares none.

A "recover" is a step that failed: the plans in flight, whose instants are its `in_flight`, are taken back, and their
numbers are given again to those made after it. `keeps_cache`: the prefix cache was kept. A "hold" keeps a request that
waits from running until its "release". A "budget" says by `tokens` how many a plan may have from then on.

Where plans may have several steps (`max_decode_steps`), an "add" has `free_running`: no token of it waits for the host.

Calls in their order
--------------------
Plan k was made at its record's `now`, which `in_flight` of records before may already tell; it was made
before whatever has a `step` of more than k plans, and before the update whose record counts it in flight.
An "expire" happened when `schedule` began, whether or not that call made a plan. A "starve" is such a call
itself; expiries right before it may be of the same call. Any other call without a plan and without expiries
changed nothing.
In an iteration's `completed` the ids aborted with reason "stop" come first, in the order of their events;
the others ended in the update itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason, Rejection, write_whole
from jaxserve.faults import InjectedFault, failpoint
from jaxserve.scheduler.page_ordinals import PageOrdinals
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.sequence import NO_SLOT, Sequence

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler
    from jaxserve.scheduler.state import Flight

SCHEMA_VERSION = 5
READABLE_VERSIONS = (3, 4, SCHEMA_VERSION)
"""A trace of version 4 begins with no snapshot and has no failed step; in one of version 3, besides, no iteration
has several steps."""
MAX_EVENTS = 256
"""So many events without an iteration make a record; what came of one call is in one record all the same."""

_LISTS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.ABORT: "aborted",
    FinishReason.EXPIRED: "expired",
    FinishReason.ERROR: "failed",
    FinishReason.UNFOLLOWABLE: "failed",
    FinishReason.DISPLACED: "rejected",
}

logger = logging.getLogger(__name__)


class TraceRecorder:
    """Collects what happens between two iterations and hands a record to `sink` at each update.

    What it keeps is bounded: every id that comes outside an update comes with an event, and after
    `MAX_EVENTS` of those a record is handed over without an iteration.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[dict[str, Any]], None]) -> None:
        self._scheduler = scheduler
        self._sink = sink
        self._num_updated = 0
        self._ordinals = PageOrdinals(scheduler) if scheduler.config.enable_prefix_caching else None
        self._clear()

    def added(self, sequences: Items[Sequence], now: float, rejection: Rejection | None) -> None:
        """Arrivals of one call were placed or queued, or refused."""
        for index, sequence in enumerate(sequences):
            self._added(sequence, now, rejection, len(sequences) if index == 0 else 1)
        self._flush_if_full()

    def _added(self, sequence: Sequence, now: float, rejection: Rejection | None, num_together: int) -> None:
        request = sequence.request
        if rejection is not None:
            self._ids["rejected"].append(request.request_id)
            outcome = rejection.reason
        else:
            outcome = "queue" if sequence.slot == NO_SLOT else "slot"
        details: dict[str, Any] = {}
        if self._ordinals and rejection is None:
            details["scores"] = request.params.prompt_logprobs is not None
            details["pages"] = self._ordinals.new_of(sequence)
        if self._scheduler.config.max_decode_steps > 1:
            details["free_running"] = request.free_running
        if request.num_imported_tokens:
            details["imports"] = request.num_imported_tokens
            details["received_at"] = request.received_at
        if request.exports_kv:
            details["exports"] = True
        if num_together > 1:
            details["together"] = num_together
        self._event(
            "add",
            request.request_id,
            now,
            prompt=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            tenant=request.tenant,
            service_class=request.service_class,
            deadline_at=request.deadline_at,
            outcome=outcome,
            **details,
        )

    def cache_reset(self, now: float) -> None:
        """The prefix cache was emptied."""
        self._event("reset_prefix_cache", "", now)
        self._flush_if_full()

    def recovered(self, now: float, *, keeps_cache: bool) -> None:
        """The plans in flight are about to be taken back."""
        self._event("recover", "", now, keeps_cache=keeps_cache, in_flight=self._instants_in_flight())
        # No record here, full or not: it would have the plans in flight that this event takes back.

    def of_request(self, kind: str, request_id: str, now: float) -> None:
        """A request is held or released."""
        self._event(kind, request_id, now)
        self._flush_if_full()

    def budget_limited(self, num_tokens: int, now: float) -> None:
        """Plans have so many tokens at most from now on."""
        self._event("budget", "", now, tokens=num_tokens)
        self._flush_if_full()

    def starved(self, now: float) -> None:
        """A call of `schedule` took slots and made no plan."""
        self._event("starve", "", now)
        self._flush_if_full()

    def ended(self, sequence: Sequence, now: float, *, early: bool, forgets: bool = False) -> None:
        """A live request ended; `early`: by its deadline or by a call of `abort`, not by a token.

        `forgets`: its pages were taken out of the prefix cache.
        """
        reason = sequence.finish_reason
        assert reason is not None, f"{sequence.request_id} is live"
        self._ids[_LISTS[reason]].append(sequence.request_id)
        numbers = self._ordinals.last_of(sequence) if self._ordinals else []
        if not early:
            self._named += [[sequence.request_id, numbers]] if numbers else []
            return
        named: dict[str, Any] = {"named": numbers} if numbers else {}
        if forgets:
            named["forgets"] = True
        if reason is FinishReason.EXPIRED:
            self._event("expire", sequence.request_id, now, **named)
        else:
            self._event("abort", sequence.request_id, now, reason=str(reason), **named)
        # The arrival that displaced it is to stand in the same record.
        if reason is not FinishReason.DISPLACED:
            self._flush_if_full()

    def iteration(self, flight: Flight, result: StepResult, bucket: Any) -> None:
        """A plan was updated by what the device answered: its record is complete."""
        scheduler, plan = self._scheduler, flight.plan
        self._num_updated += 1
        self._sink(
            {
                "iteration": plan.iteration,
                "now": flight.now,
                "decode": list(plan.decode.request_ids),
                **self._steps(plan, result),
                "prefill": [[chunk.request_id, len(chunk.token_ids)] for chunk in plan.prefill],
                "prefill_emitted": [chunk.request_id for chunk in plan.prefill if chunk.emits],
                "preempted": list(plan.preempted),
                **self._ids,
                "queue": scheduler.waiting_ids,
                "active": scheduler.active_ids,
                "unused_budget": scheduler.config.max_num_batched_tokens - plan.num_tokens,
                "pages_free": scheduler.pages_free,
                "pages_cached": scheduler.pages_cached,
                "pages_owned": scheduler.pages_owned,
                "front_waits_for": flight.waits_for and str(flight.waits_for),
                "bucket": bucket,
                "in_flight": self._instants_in_flight(),
                "updated_at": scheduler._updated_at,
                "preempted_next": list(scheduler._preempted),
                **self._swapping(plan),
                **_transfers(plan),
                **self._sharing(plan),
                "events": self._events,
            }
        )
        self._clear()

    def flush(self) -> None:
        """Hands over what came in since the record before, if anything did."""
        if self._events or any(self._ids.values()):
            in_flight = self._instants_in_flight()
            self._sink({"kind": "events", **self._ids, "in_flight": in_flight, "events": self._events})
            self._clear()

    def _event(self, kind: str, request_id: str, now: float, **details: Any) -> None:
        step = [self._scheduler.num_plans, self._num_updated]
        self._events.append({"kind": kind, "id": request_id, "now": now, "step": step, **details})

    def _flush_if_full(self) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.flush()

    def _steps(self, plan: StepPlan, result: StepResult) -> dict[str, Any]:
        if self._scheduler.config.max_decode_steps == 1:
            return {}
        counts = [1] * len(plan.decode) if plan.num_steps == 1 else [len(run) for run in result.decode_runs]
        return {"decode_steps": plan.num_steps, "decode_tokens": counts}

    def _swapping(self, plan: StepPlan) -> dict[str, Any]:
        scheduler = self._scheduler
        if not scheduler.config.num_host_pages:
            return {}
        return {
            "swapped_out": [[swap.request_id, len(swap.page_ids)] for swap in plan.swaps if swap.out],
            "swapped_in": [[swap.request_id, len(swap.page_ids)] for swap in plan.swaps if not swap.out],
            "host_pages_free": scheduler.host_pages_free,
        }

    def _sharing(self, plan: StepPlan) -> dict[str, Any]:
        """Pages that the requests of `plan` filled, with those of the requests that ended in it."""
        if self._ordinals is None:
            return {}
        ids = [*plan.decode.request_ids, *(chunk.request_id for chunk in plan.prefill)]
        for request_id in ids:
            sequence = self._scheduler._live.get(request_id)
            if sequence and (numbers := self._ordinals.new_of(sequence)):
                self._named.append([request_id, numbers])
        return {"named": self._named}

    def _instants_in_flight(self) -> list[float]:
        return [flight.now for flight in self._scheduler._in_flight]

    def _clear(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._named: list[list[Any]] = []
        self._ids: dict[str, list[str]] = {key: [] for key in ("rejected", "completed", "aborted", "expired", "failed")}


def _transfers(plan: StepPlan) -> dict[str, Any]:
    pairs = {
        key: [[move.request_id, len(move.page_ids)] for move in moves]
        for key, moves in (("imported", plan.imports), ("exported", plan.exports))
    }
    return {key: moves for key, moves in pairs.items() if moves}


class TraceWriter:
    """A trace sink: writes a header, then each record, as lines of JSON.

    A full or lost disk ends the trace at its last whole line, with one logged error, never the engine.

    Args:
      path: overwritten.
      model: name of the model, for the header.
      config: the scheduler's settings, for the header.
      died: of an engine that died: what the header says of that; the trace may then begin with a snapshot.

    Attributes:
      num_errors: 1 once the trace has ended early.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: str = "",
        config: SchedulerConfig | None = None,
        died: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = Path(path)
        self.num_errors = 0
        self._size = 0
        self._file: FileIO | None = FileIO(self._path, "w")  # unbuffered: what happened before a crash is there
        settings = None if config is None else asdict(config)
        if settings and not settings["group_windows"]:
            del settings["group_windows"]  # as long as layers are one group, older versions can read it
        header = {"kind": "header", "schema_version": SCHEMA_VERSION, "model": model, "config": settings}
        self._write(header if died is None else header | {"died": died})

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Writes one record."""
        self._write(record)

    def close(self) -> None:
        """Closes the file; later records are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            failpoint("trace.write")
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
            self._size = write_whole(self._file.fileno(), line, self._size)
        except (OSError, InjectedFault) as error:
            logger.error("trace_file %s ends here: %s", self._path, error)
            self.num_errors += 1
            self.close()


def both(
    first: Callable[[dict[str, Any]], None] | None, second: Callable[[dict[str, Any]], None] | None
) -> Callable[[dict[str, Any]], None] | None:
    """A sink that gives every record to both; None where there is neither."""
    if first is None or second is None:
        return first or second

    def give(record: dict[str, Any]) -> None:
        first(record)
        second(record)

    return give
