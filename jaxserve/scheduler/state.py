"""SchedulerState: who is where, and the elementary moves between places.

It knows nothing of why a request moves; `Scheduler` decides. Each move here leaves slots, pages,
reservation and queue consistent with each other, so the decisions can be read without the bookkeeping.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import invariants
from jaxserve.scheduler.counters import Counters, DepartureRate
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.plan import PageUpdate, StepPlan
from jaxserve.scheduler.policies import ORDERS, PREEMPTIONS, RESERVATIONS
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.slots import SlotPool
from jaxserve.scheduler.waiting_queue import SequenceHeap, WaitingQueue


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan not yet updated, and the sequences of its rows: an id may be reused meanwhile, these not."""

    plan: StepPlan
    now: float
    decode: list[Sequence]
    prefill: list[Sequence]


class SchedulerState:
    """The scheduler's tables, their read-only views and the moves.

    Args:
      config: limits and the names of the policies.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._reservation = RESERVATIONS[config.reservation](config)
        self._preemption = PREEMPTIONS[config.preemption](config)
        self._pages = PageAllocator(config.num_pages)
        self._slots = SlotPool(config.max_num_seqs)
        self._waiting = WaitingQueue(config, ORDERS[config.policy](config))
        self._deadlines = SequenceHeap()
        self._departures = DepartureRate()
        self._live: dict[str, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # by slot, in promotion order
        self._unplaced: dict[int, Sequence] = {}  # by slot: took it since the last plan
        self._preempted: list[str] = []  # since the last plan
        self._in_flight: deque[Flight] = deque()
        self._num_arrivals = 0
        self._num_plans = 0

    # What can be read

    @property
    def num_running(self) -> int:
        """Live requests that are not waiting: those with a slot, and those whose last step is in flight."""
        return len(self._live) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompts and granted outputs."""
        return self._waiting.num_tokens

    @property
    def num_free_slots(self) -> int:
        """Slots nobody holds."""
        return self._slots.num_free

    @property
    def pages_free(self) -> int:
        """Pages without owner; free + cached + owned = num_pages - 1."""
        return self._pages.num_free

    @property
    def pages_cached(self) -> int:
        """Pages kept for their content alone: none, ended requests leave nothing behind."""
        return 0

    @property
    def pages_owned(self) -> int:
        """Pages of requests that are live or have a step in flight."""
        return self._pages.num_owned

    @property
    def num_plans(self) -> int:
        """Plans made so far, the number of the next one."""
        return self._num_plans

    @property
    def idle(self) -> bool:
        """No request is live and no plan in flight."""
        return not self._live and not self._in_flight

    @property
    def live_ids(self) -> list[str]:
        """Ids of live requests, in arrival order."""
        return list(self._live)

    @property
    def active_ids(self) -> list[str]:
        """Ids of the requests that hold a slot, in promotion order."""
        return [sequence.request_id for sequence in self._running.values()]

    @property
    def waiting_ids(self) -> list[str]:
        """Ids in the queue, in promotion order; sorts them."""
        return [sequence.request_id for sequence in self._waiting]

    def sequence(self, request_id: str) -> Sequence:
        """The record of a live request; treat it as read-only.

        Raises:
          KeyError: no live request has this id.
        """
        return self._live[request_id]

    def check_invariants(self) -> None:
        """Asserts what may never happen, naming ids. O(everything): for tests."""
        invariants.check(self)

    # Moves

    def _occupy(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.take()
        self._running[sequence.slot] = self._unplaced[sequence.slot] = sequence

    def _vacate(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that holds one."""
        del self._running[sequence.slot]
        self._unplaced.pop(sequence.slot, None)
        self._slots.give(sequence.slot)
        sequence.slot = NO_SLOT

    def _preempt(self, victim: Sequence) -> None:
        self._vacate(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self._preempted.append(victim.request_id)
        self._waiting.push(victim)

    def _depart(self, sequence: Sequence, now: float) -> None:
        """A row of it is in a plan; after its last one the slot is the next plan's to use."""
        sequence.num_in_flight += 1
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
        if sequence.fully_scheduled:
            self._vacate(sequence)

    def _advance(self, sequence: Sequence, num_tokens: int, pages: list[PageUpdate]) -> None:
        """Counts tokens as written and gives the sequence the pages they go to."""
        sequence.num_scheduled += num_tokens
        held = len(sequence.pages)
        lacking = -(-sequence.num_scheduled // self.config.page_size) - held
        if lacking > 0:
            new = self._pages.allocate(lacking)
            sequence.pages += new
            pages.append(PageUpdate(sequence.slot, held, tuple(new)))

    def _release_pages(self, sequence: Sequence) -> None:
        """Frees the pages of an ended sequence once no step in flight can touch them."""
        if sequence.num_in_flight:
            return
        self._pages.free(sequence.pages)
        sequence.pages = []
        self._reservation.release(sequence)
