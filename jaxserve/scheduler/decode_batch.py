"""DecodeBatch: who gets a token in every plan, and the columns of their rows."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from jaxserve.scheduler.plan import DecodeRows
from jaxserve.scheduler.sequence import Sequence

_turn = attrgetter("turn")


class DecodeBatch:
    """The decode-ready sequences that hold a slot, in promotion order.

    Few join or leave from one plan to the next, so the columns that stay the same are kept and not made anew.
    Joining and leaving move the ends of lists, which costs next to nothing at these lengths.

    Attributes:
      sequences: treat it as read-only; it changes in place.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._request_ids: list[str] = []
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """Takes in a sequence that is not in; it holds a slot."""
        index = self.index(sequence)
        self.sequences.insert(index, sequence)
        self._request_ids.insert(index, sequence.request_id)
        self._slots.insert(index, sequence.slot)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is in."""
        index = self.index(sequence)
        if index < len(self.sequences) and self.sequences[index] is sequence:
            del self.sequences[index], self._request_ids[index], self._slots[index]

    def index(self, sequence: Sequence) -> int:
        """The row of a sequence; of one that is not in, the row it would have."""
        return bisect_left(self.sequences, sequence.turn, key=_turn)

    def rows(self) -> DecodeRows:
        """The next row of each."""
        positions = tuple([sequence.num_scheduled for sequence in self.sequences])
        return DecodeRows(tuple(self._request_ids), tuple(self._slots), positions)
