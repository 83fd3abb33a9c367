"""DecodeBatch: who gets a token in every plan, and the columns of their rows."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from jaxserve.scheduler.sequence import Sequence

_turn = attrgetter("turn")


class DecodeBatch:
    """The decode-ready sequences that hold a slot, in promotion order.

    Few join or leave from one plan to the next, so the columns that stay the same are kept and not made anew.
    Joining and leaving move the ends of lists, which costs next to nothing at these lengths.

    Attributes:
      sequences, request_ids, slots: a column each; treat them as read-only, they change in place.
      num_by_tenant: sequences of each tenant that has any.
      num_bound: sequences that are not free-running (`Request.free_running`).
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.request_ids: list[str] = []
        self.slots: list[int] = []
        self.num_by_tenant: dict[str, int] = {}
        self.num_bound = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """Takes in a sequence that is not in; it holds a slot."""
        index = self.index(sequence)
        self.sequences.insert(index, sequence)
        self.request_ids.insert(index, sequence.request_id)
        self.slots.insert(index, sequence.slot)
        self.num_bound += not sequence.request.free_running
        tenant = sequence.request.tenant
        self.num_by_tenant[tenant] = self.num_by_tenant.get(tenant, 0) + 1

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is in."""
        index = self.index(sequence)
        if index == len(self.sequences) or self.sequences[index] is not sequence:
            return
        del self.sequences[index], self.request_ids[index], self.slots[index]
        self.num_bound -= not sequence.request.free_running
        tenant = sequence.request.tenant
        self.num_by_tenant[tenant] -= 1
        if not self.num_by_tenant[tenant]:
            del self.num_by_tenant[tenant]

    def index(self, sequence: Sequence) -> int:
        """The row of a sequence; of one that is not in, the row it would have."""
        if not self.sequences or self.sequences[-1].turn < sequence.turn:
            return len(self.sequences)  # where most of those that join do
        return bisect_left(self.sequences, sequence.turn, key=_turn)
