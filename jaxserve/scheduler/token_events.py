"""TokenEvents: what a step's return means for the requests in it, kept by column."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from jaxserve.scheduler.plan import TokenEvent


@dataclass(slots=True, eq=False)
class TokenEvents(Items[TokenEvent]):
    """The events of an update, in row order: decode rows, then chunks.

    Nearly every decode row brings a token and nothing else. So those are stored as columns, mostly the plan's
    and the result's own, and a `TokenEvent` is made for those who ask for one.

    In a plan of several steps a row brings several tokens, one after another; an end comes with the last of them.

    Attributes:
      request_ids: of the decode rows whose requests were live.
      token_ids: likewise, of each the first.
      later: likewise, of each the tokens after its first; empty of a plan of one step.
      rows: likewise, indices into the plan's decode rows.
      ends: events of those that ended their requests, by row, ascending.
      prefill: events of chunks.
      num_wasted: rows and chunks whose requests had ended; of several steps, each of a row counts.
    """

    request_ids: Items[str] = ()
    token_ids: Items[int] = ()
    rows: Items[int] = ()
    ends: dict[int, TokenEvent] = field(default_factory=dict)
    prefill: list[TokenEvent] = field(default_factory=list)
    num_wasted: int = 0
    later: Items[Items[int]] = ()

    def __len__(self) -> int:
        return self._num_decoded + len(self.prefill)

    def __iter__(self) -> Iterator[TokenEvent]:
        if self.later:
            return chain(self._runs(), self.prefill)
        return chain(map(self._decoded, self.request_ids, self.token_ids, self.rows), self.prefill)

    @overload
    def __getitem__(self, index: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenEvent]: ...
    def __getitem__(self, index: int | slice) -> TokenEvent | list[TokenEvent]:
        return list(self)[index]

    @property
    def ended(self) -> list[TokenEvent]:
        """Events that ended their requests, in order."""
        return [*self.ends.values(), *(event for event in self.prefill if event.finish_reason is not None)]

    @property
    def num_tokens(self) -> int:
        """Events with a token."""
        return self._num_decoded + sum(event.token_id is not None for event in self.prefill)

    @property
    def _num_decoded(self) -> int:
        return len(self.rows) + sum(map(len, self.later))

    def _runs(self) -> Iterator[TokenEvent]:
        columns = zip(self.request_ids, self.token_ids, self.later, self.rows, strict=True)
        for request_id, first, later, row in columns:
            *others, last = (first, *later)
            for token_id in others:
                yield TokenEvent(request_id, token_id, "decode", row)
            yield self._decoded(request_id, last, row)

    def _decoded(self, request_id: str, token_id: int, row: int) -> TokenEvent:
        return self.ends.get(row) or TokenEvent(request_id, token_id, "decode", row)
