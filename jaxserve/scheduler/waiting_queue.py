"""The waiting queue: bounded in requests and tokens, ordered by the policy, cheap to leave from anywhere.

It is one line per service class. A class at its slot limit is passed over, and nobody of another class
waits behind it. Whom a failed step sent back stands ahead of all lines, in the order in which they had their slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Items

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.fair_line import FairLine
from jaxserve.scheduler.orders import Order
from jaxserve.scheduler.queue_load import QueueLoad
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap


class WaitingQueue:
    """Requests without a slot: fresh ones, preempted ones, and those that a failed step sent back.

    All bounds hold at all times; a preempted request counts like any other.

    Args:
      config: bounds and service classes.
      order: who is promoted first.
      class_is_full: whether a class may take no further slot.
    """

    def __init__(self, config: SchedulerConfig, order: Order, class_is_full: Callable[[str], bool]) -> None:
        self._max_requests = config.max_queue_requests
        self._order = order
        self._class_is_full = class_is_full
        names = ("", *(service_class.name for service_class in config.service_classes))
        self._lines = {name: SequenceHeap() if order.counters is None else FairLine(order.counters) for name in names}
        self._first = {name: SequenceHeap() for name in names}  # ahead of the lines
        self._held: dict[Sequence, None] = {}  # may not be promoted
        self._load = QueueLoad(config)
        # Who is displaced first: the lowest class, there the latest arrival.
        self._by_rank = SequenceHeap() if config.queue_displacement else None
        self._paused = SequenceHeap()  # those of the lines that kept their pages

    def __len__(self) -> int:
        return self._load.num_requests

    def __contains__(self, sequence: Sequence) -> bool:
        name = sequence.request.service_class
        return sequence in self._lines[name] or sequence in self._first[name] or sequence in self._held

    def __iter__(self) -> Iterator[Sequence]:
        """In promotion order as of now, those that are held last; sorts, so for traces and checks only."""
        found: list[Sequence] = []
        places: tuple[Mapping[str, SequenceHeap | FairLine], ...] = (self._first, self._lines)
        for lines in places:
            entries = [entry for line in lines.values() for entry in line.entries()]
            found += [sequence for _, sequence in sorted(entries, key=lambda entry: entry[0])]
        return iter((*found, *self._held))

    @property
    def held(self) -> Collection[Sequence]:
        """Those that may not be promoted."""
        return self._held.keys()

    @property
    def num_tokens(self) -> int:
        """Prompts and granted outputs of all."""
        return self._load.num_tokens

    @property
    def is_beyond_bound(self) -> bool:
        """Requests that lost their pages came back to a full queue."""
        return self._load.num_requests > self._max_requests

    def refusal(self, sequence: Sequence) -> str | None:
        """Which bound `sequence` would break, as a rejection reason; None when there is room."""
        return self._load.refusal(sequence)

    def refusal_of_all(self, sequences: Items[Sequence], *, beside: Sequence | None = None) -> str | None:
        """Which bound would be broken if all of `sequences` came, each displacing another where it must and may.

        Args:
          sequences: of one priority.
          beside: one more that would be in the queue before them.
        """
        if len(sequences) == 1 and beside is None:  # nearly always: no copy to look ahead with
            reason = self.refusal(sequences[0])
            return reason if reason is not None and self.displaceable(sequences[0]) is None else None
        load = self._load.copy()
        if beside is not None:
            load.add(beside)
        lowest = self._lowest(len(sequences))
        for sequence in sequences:
            reason = load.refusal(sequence)
            if reason is not None:
                other = next(lowest, None)
                if other is None or not load.makes_room(other, sequence):
                    return reason
                load.remove(other)
            load.add(sequence)
        return None

    def push(self, sequence: Sequence) -> None:
        """Puts in a sequence for which `refusal` is None; as long as somebody is held, ahead of the lines if it ran."""
        if self._held and sequence.turn >= 0:
            self.push_first(sequence)
            return
        self._lines[sequence.request.service_class].push(self._order.key(sequence), sequence)
        self._note_paused(sequence)
        if self._by_rank is not None and not sequence.num_preemptions and not sequence.num_recoveries:
            self._by_rank.push((-sequence.request.priority, -sequence.arrival), sequence)
        self._load.add(sequence)

    def push_first(self, sequence: Sequence) -> None:
        """Puts in a sequence ahead of all lines, whatever the bounds."""
        self._first[sequence.request.service_class].push((sequence.turn, sequence.arrival), sequence)
        self._note_paused(sequence)
        self._load.add(sequence)

    def _note_paused(self, sequence: Sequence) -> None:
        keeps_pages = not (sequence.restarted or sequence.is_swapped_out or sequence.num_to_import)
        if sequence.num_preemptions and keeps_pages:
            self._paused.push(self._order.key(sequence), sequence)

    def hold(self, sequence: Sequence) -> bool:
        """Lets a sequence wait without being promoted; False where it does not wait, or is held already."""
        if sequence in self._held or not self.remove(sequence):
            return False
        self._held[sequence] = None
        self._load.add(sequence)
        return True

    def release(self, sequence: Sequence) -> bool:
        """Puts a held sequence ahead of all lines; False where it is not held."""
        if sequence not in self._held:
            return False
        self.remove(sequence)
        self.push_first(sequence)
        return True

    def remove(self, sequence: Sequence) -> bool:
        """Takes a sequence out, from anywhere; False if it is not waiting."""
        name = sequence.request.service_class
        if sequence in self._held:
            del self._held[sequence]
        elif not (self._first[name].remove(sequence) or self._lines[name].remove(sequence)):
            return False
        if self._by_rank is not None:
            self._by_rank.remove(sequence)
        self._paused.remove(sequence)
        self._load.remove(sequence)
        return True

    def front(self) -> Sequence | None:
        """The next to be promoted, classes at their slot limit left out."""
        places: tuple[Mapping[str, SequenceHeap | FairLine], ...] = (self._first, self._lines)
        for lines in places[:1] if self._held else places:
            fronts = [
                front for name, line in lines.items() if (front := line.front()) and not self._class_is_full(name)
            ]
            if fronts:
                return min(fronts, key=lambda front: front[0])[1]
        return None

    def paused(self) -> Sequence | None:
        """The first of those that kept their pages, unless its class is at its slot limit."""
        front = self._paused.front()
        return front[1] if front and not self._class_is_full(front[1].request.service_class) else None

    def would_lead(self, sequence: Sequence) -> bool:
        """Whether nobody that could be promoted waits ahead of `sequence`."""
        front = self.front()
        if front is None or front in self._first[front.request.service_class]:
            return front is None
        return self._order.place(sequence) < self._order.place(front)

    def displaceable(self, sequence: Sequence) -> Sequence | None:
        """Whose place a refused `sequence` may take, where displacement is on.

        It is the fresh request of the lowest class, if that is below the sequence's and its leaving makes room.
        """
        other = next(self._lowest(1), None)
        return other if other is not None and self._load.makes_room(other, sequence) else None

    def _lowest(self, count: int) -> Iterator[Sequence]:
        """Whom displacement takes first, up to `count`; only the second and later ones cost a pass over the queue."""
        front = self._by_rank.front() if self._by_rank is not None else None
        if self._by_rank is None or front is None:
            return
        yield front[1]
        yield from (sequence for _, sequence in heapq.nsmallest(count, self._by_rank.entries())[1:])
