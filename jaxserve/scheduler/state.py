"""SchedulerState: who is where, and the elementary moves between places.

It knows nothing of why a request moves; `Scheduler` decides. Each move here leaves slots, pages,
reservation and queue consistent with each other, so the decisions can be read without the bookkeeping.
"""

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
from jaxserve.scheduler.plan import PageSwap, StepPlan
from jaxserve.scheduler.preemption import PreemptionChoice
from jaxserve.scheduler.prefix_cache import page_name, root_of
from jaxserve.scheduler.reservations import RESERVATIONS
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
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
    """The scheduler's tables, their read-only views and the moves.

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
        self._passed: list[tuple[Sequence, int, int, int]] = []  # likewise: whose pages, slot, first page, count
        self._in_flight: deque[Flight] = deque()
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

    # Moves

    def _class_is_full(self, name: str) -> bool:
        limit = self._max_slots.get(name)
        return limit is not None and self._num_slots_held[name] >= limit

    def _reserve(self, sequence: Sequence, victim: Sequence | None = None) -> bool:
        """Promises a sequence its pages and gives it those that the prefix cache has; False: no change."""
        first, shared = self._cached_pages(sequence)
        running = self._running.values()
        if not self._reservation.reserve(sequence, running, victim=victim, shared=shared, first=first):
            return False
        if shared:
            self._pages.share(shared, passing=sequence.gives_pages_back)
            sequence.pages += shared
            sequence.num_named_pages = first + len(shared)
        sequence.num_passed_pages = first
        if sequence.num_pages and not sequence.num_scheduled:
            sequence.num_scheduled = sequence.num_pages * self.config.page_size
            self.counters.cached_tokens += sequence.num_scheduled
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = sequence.num_scheduled
        return True

    def _cached_pages(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Pages of its beginning; the last token is always computed, and so are prompts that want scores.

        Of one that was swapped out, the pages that are still there need not be copied back. With a sliding window the
        pages before a token and its window are not needed: a beginning is found by its last pages.

        Returns:
          Number of the first page, and the pages.
        """
        config, passed = self.config, sequence.num_passed_pages
        if not config.enable_prefix_caching or sequence.pages:
            return passed, []
        if sequence.host_pages:
            count = sequence.num_scheduled // config.page_size
        elif sequence.num_scheduled or sequence.request.params.prompt_logprobs is not None:
            return passed, []
        else:
            count = (sequence.num_known_tokens - 1) // config.page_size
        self._name_pages(sequence, count)
        if config.sliding_window and not sequence.host_pages:
            return self._pages.cache.find_last(sequence.page_names[:count], config.pages_spanned(1) - 1)
        return passed, self._pages.cache.find(sequence.page_names[passed:count])

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        size, names = self.config.page_size, sequence.page_names
        while len(names) < count:
            parent = names[-1] if names else root_of(sequence.request)
            names.append(page_name(parent, sequence.token_ids(len(names) * size, (len(names) + 1) * size)))

    def _remember_pages(self, sequence: Sequence, num_written: int) -> None:
        """Enters the full pages among the first `num_written` tokens in the prefix cache."""
        count = num_written // self.config.page_size
        self._name_pages(sequence, count)
        passed = sequence.num_passed_pages
        for index in range(max(sequence.num_named_pages, passed), count):
            self._pages.cache.enter(sequence.page_names[index], sequence.pages[index - passed])
        sequence.num_named_pages = max(sequence.num_named_pages, count)

    def _pass_pages(self) -> None:
        """Gives back what no plan from now on reads; the next plan tells the device, whose steps run in order."""
        size = self.config.page_size
        least = size + self.config.sliding_window - 1
        running = self._running.values()
        for sequence in [each for each in running if each.num_scheduled - each.num_passed_pages * size >= least]:
            first = sequence.num_passed_pages
            count = self._give_passed(sequence)
            self._passed.append((sequence, sequence.slot, first, count))

    def _give_passed(self, sequence: Sequence) -> int:
        """Gives back the pages whose tokens the next row of `sequence` does not see; how many."""
        if not sequence.gives_pages_back:
            return 0
        config = self.config
        passed = max(sequence.num_scheduled + 1 - config.sliding_window, 0) // config.page_size
        count = passed - sequence.num_passed_pages
        if not count:
            return 0
        if config.enable_prefix_caching:
            # A step in flight may still have to write them. Its tokens are not all known if it has several steps.
            known = max(sequence.num_prompt_tokens, sequence.num_known_tokens - 1)
            self._remember_pages(sequence, min(passed * config.page_size, known))
        self._pages.release(sequence.pages[:count], passing=True)
        del sequence.pages[:count]
        sequence.num_passed_pages = passed
        self._reservation.passed(sequence, count)
        return count

    def _remember_written(self, flight: Flight) -> None:
        """A step came back: what it wrote can be shared from now on."""
        size = self.config.page_size
        # Tokens of several steps are not known yet: `RowLander` remembers them one by one.
        rows = zip(flight.decode, flight.plan.decode.positions, strict=True) if flight.plan.num_steps == 1 else ()
        # A decode row can fill a page only by the page's last token.
        written = [(sequence, position + 1) for sequence, position in rows if not (position + 1) % size]
        written += [(sequence, chunk.end) for sequence, chunk in zip(flight.prefill, flight.plan.prefill, strict=True)]
        for sequence, num_written in written:
            if sequence.finish_reason is None and not sequence.restarted and not sequence.host_pages:
                self._remember_pages(sequence, num_written)

    def _enter(self, sequence: Sequence) -> None:
        """It asks for service; `_leave` when it no longer does."""
        if self._order.counters is not None:
            self._order.counters.enter(sequence.request.tenant)

    def _leave(self, sequence: Sequence) -> None:
        if self._order.counters is not None:
            self._order.counters.leave(sequence.request.tenant)

    def _occupy(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.take()
        self._running[sequence.slot] = self._unplaced[sequence.slot] = sequence
        sequence.num_outputs_at_start = len(sequence.output_token_ids)
        if sequence.restarted:
            sequence.restarted = False
            sequence.num_prefill_tokens = sequence.num_known_tokens
        if sequence.host_pages:
            self._swap_in(sequence)
        if sequence.request.service_class in self._num_slots_held:
            self._num_slots_held[sequence.request.service_class] += 1
        if self._order.counters is not None:
            self._order.counters.serve(sequence.request.tenant)
        sequence.turn = self._num_promotions
        self._num_promotions += 1
        if sequence.decode_ready:
            self._decoding.join(sequence)
        else:
            self._prefilling[sequence.slot] = sequence

    def _vacate(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that holds one."""
        del self._running[sequence.slot]
        self._unplaced.pop(sequence.slot, None)
        if self._prefilling.pop(sequence.slot, None) is None:
            self._decoding.leave(sequence)
        self._slots.give(sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.request.service_class in self._num_slots_held:
            self._num_slots_held[sequence.request.service_class] -= 1

    def _preempt(self, victim: Sequence) -> None:
        """Sends a sequence from its slot to the queue, with its pages, a copy of them on the host, or none."""
        self._vacate(victim)
        victim.num_preemptions += 1
        victim.num_setbacks += 1
        self.counters.preemptions += 1
        self._preempted.append(victim.request_id)
        self._give_passed(victim)
        mode = self._preemption.mode_for(victim)
        if mode == "swap":
            self._swap_out(victim)
        elif mode == "recompute":
            self.counters.count_recomputed(victim.request.service_class, victim.num_scheduled)
            victim.num_scheduled = 0
            victim.restarted = True
            self._release_pages(victim)
        self._waiting.push(victim)

    def _swap_out(self, victim: Sequence) -> None:
        """Its pages are free for the next plan, which copies them to the host before anything else."""
        victim.host_pages = self._host_pages.allocate(len(victim.pages))
        self._swap(victim, True, victim.pages, victim.host_pages)
        self._reservation.release(victim)
        self._pages.release(victim.pages, passing=victim.gives_pages_back)
        victim.pages = []
        victim.num_named_pages = 0

    def _swap_in(self, sequence: Sequence) -> None:
        """Takes promised pages for what the prefix cache no longer has of it."""
        num_shared = len(sequence.pages)
        lacking = sequence.host_pages[num_shared:]
        if lacking:
            self._reservation.take(sequence, len(lacking))
            pages = self._pages.allocate(len(lacking), passing=sequence.gives_pages_back)
            self._swap(sequence, False, pages, lacking)
            sequence.pages += pages
        self._free_host_pages(sequence)

    def _swap(self, sequence: Sequence, out: bool, pages: list[int], host_pages: list[int]) -> None:
        self._swaps.append(PageSwap(sequence.request_id, out, tuple(pages), tuple(host_pages)))
        self.counters.count_swapped(sequence.request.service_class, len(pages))

    def _free_host_pages(self, sequence: Sequence) -> None:
        self._host_pages.release(sequence.host_pages)
        sequence.host_pages = []

    def _release_pages(self, sequence: Sequence) -> None:
        """Gives back promises at once, and pages as soon as no step in flight can touch them."""
        self._reservation.release(sequence)
        if sequence.num_in_flight:
            return
        self._pages.release(sequence.pages, passing=sequence.gives_pages_back)
        sequence.pages = []
        sequence.num_passed_pages = sequence.num_named_pages = 0
