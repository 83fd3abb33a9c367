"""SchedulerState: who is where. `moves` has the elementary moves between places."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import invariants
from jaxserve.scheduler.batching import Batching
from jaxserve.scheduler.counters import Counters, DepartureRate
from jaxserve.scheduler.decode_batch import DecodeBatch
from jaxserve.scheduler.host_pages import HostPages
from jaxserve.scheduler.length_estimator import LengthEstimator
from jaxserve.scheduler.orders import ORDERS
from jaxserve.scheduler.page_allocator import PageAllocator
from jaxserve.scheduler.plan import PageMove, PageSwap, StepPlan
from jaxserve.scheduler.preemption import PreemptionChoice
from jaxserve.scheduler.reservations import RESERVATIONS
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap
from jaxserve.scheduler.slots import SlotPool
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.victims import VictimChoice
from jaxserve.scheduler.waiting_queue import WaitingQueue
from jaxserve.scheduler.waits_for import WaitsFor


@dataclass(slots=True, eq=False)
class Flight:
    """A plan not yet updated, and the sequences of its rows: an id may be reused meanwhile, these not.

    `last_rows` are the decode rows, ascending, that were the last ones of their sequences.
    `waits_for`: what the queue's front lacked when the plan was made; None when nobody waited.
    """

    plan: StepPlan
    now: float
    decode: list[Sequence]
    prefill: list[Sequence]
    last_rows: list[int]
    waits_for: WaitsFor | None


class SchedulerState:
    """The scheduler's tables and their read-only views.

    Args:
      config: limits and the names of the policies.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._lengths = LengthEstimator()
        targets = config.itl_target_s is not None or any(c.itl_target_s is not None for c in config.service_classes)
        priced = config.preemption == "auto"
        self._step_time = StepTimeModel(fits=targets or priced or config.max_decode_steps > 1)
        self._pages = PageAllocator(config.num_pages)
        self._host_pages = HostPages(config.num_host_pages)
        self._reservation = RESERVATIONS[config.reservation](config, self._pages, self._lengths)
        self._victims = VictimChoice(config.victim, config.max_preemptions)
        self._preemption = PreemptionChoice(config.preemption, self._host_pages, self._step_time)
        self._batching = Batching(config)
        self._slots = SlotPool(config.max_num_seqs)
        self._order = ORDERS[config.policy](config, self._lengths)
        self._waiting = WaitingQueue(config, self._order, self._class_is_full)
        self._returning: list[Sequence] = []  # lost their pages with a step in flight, which still needs them
        self._max_slots = {c.name: c.max_slots for c in config.service_classes if c.max_slots is not None}
        # Of the classes that have a limit of slots or a target of their own.
        counted = [c.name for c in config.service_classes if c.max_slots is not None or c.itl_target_s is not None]
        self._num_slots_held = dict.fromkeys(counted, 0)
        self._deadlines = SequenceHeap()
        self._departures = DepartureRate()
        self._live: dict[str, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # by slot, in promotion order
        self._decoding = DecodeBatch()  # those of them that are decode-ready
        self._prefilling: dict[int, Sequence] = {}  # the others, by slot, in promotion order
        self._unplaced: dict[int, Sequence] = {}  # by slot: took it since the last plan
        self._preempted: list[str] = []  # since the last plan
        self._swaps: list[PageSwap] = []  # likewise
        self._imports: list[PageMove] = []  # of the plan that is being made
        self._exports: list[PageMove] = []  # likewise
        # Likewise: whose pages, slot, group, first page, count.
        self._passed: list[tuple[Sequence, int, int, int, int]] = []
        self._windows = config.windows
        # Of each window the first group, and how far behind it lies where a page is to be given back.
        self._passing = [
            (self._windows.index(window), config.page_size + window - 1)
            for window in dict.fromkeys(self._windows)
            if window
        ]
        # By group, the pages before the next token that it sees.
        self._seen_pages = [config.pages_spanned(1, window) - 1 if window else None for window in self._windows]
        self._in_flight: deque[Flight] = deque()
        self._budget = config.max_num_batched_tokens
        self._num_arrivals = 0
        self._num_plans = 0
        self._num_promotions = 0

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
        """Pages without owner and content; free + cached + owned = num_pages - 1."""
        return self._pages.num_free

    @property
    def pages_cached(self) -> int:
        """Pages kept for their content alone."""
        return self._pages.num_cached

    @property
    def pages_owned(self) -> int:
        """Pages of requests that are live or have a step in flight."""
        return self._pages.num_owned

    @property
    def host_pages_free(self) -> int:
        """Pages of the host pool that hold nobody's K/V."""
        return self._host_pages.num_free

    @property
    def num_plans(self) -> int:
        """Plans made so far, the number of the next one."""
        return self._num_plans

    @property
    def num_in_flight(self) -> int:
        """Plans made and not yet updated."""
        return len(self._in_flight)

    @property
    def oldest_flight(self) -> Flight:
        """The plan to be updated next, with the sequences of its rows; treat it as read-only."""
        return self._in_flight[0]

    @property
    def token_budget(self) -> int:
        """Tokens of a plan at most: the settings', or fewer (`limit_budget`)."""
        return self._budget

    @property
    def has_slot_to_give(self) -> bool:
        """A slot is free, and fewer are held than a plan may have tokens."""
        return bool(self._slots.num_free) and len(self._running) < self._budget

    @property
    def held_ids(self) -> list[str]:
        """Ids of the requests that are held, in the order in which they were."""
        return [sequence.request_id for sequence in self._waiting.held]

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

    @property
    def holders(self) -> list[Sequence]:
        """The requests that hold a slot, lowest slot first; treat them as read-only."""
        return [self._running[slot] for slot in sorted(self._running)]

    def first_waiting(self, count: int) -> list[Sequence]:
        """Of the requests that wait, the first by arrival, at most `count`; the work does not grow with the queue."""
        others = len(self._live) - len(self._waiting)
        oldest = islice(self._live.values(), others + count)
        return [sequence for sequence in oldest if sequence in self._waiting][:count]

    def sequence(self, request_id: str) -> Sequence:
        """The record of a live request; treat it as read-only.

        Raises:
          KeyError: no live request has this id.
        """
        return self._live[request_id]

    def check_invariants(self) -> None:
        """Asserts what may never happen, naming ids. O(everything): for tests."""
        invariants.check(self)

    def _class_is_full(self, name: str) -> bool:
        limit = self._max_slots.get(name)
        return limit is not None and self._num_slots_held[name] >= limit
