"""RowPlanner: who is in an iteration becomes rows of its plan.

`Scheduler` decides who that is. Here rows are made, and what they say is counted as done: tokens scheduled,
pages handed out, slots freed of those that need no more rows.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.scheduler.plan import DecodeRows, PageUpdate, Placement, PrefillChunk
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state import SchedulerState


class RowPlanner(SchedulerState):
    """The scheduler's tables, and the rows made from them."""

    def _new_placements(self) -> tuple[list[Placement], list[PageUpdate]]:
        """Of the requests that took a slot since the last plan, with the pages they bring along."""
        placements, pages = [], []
        for slot, sequence in self._unplaced.items():
            outputs = len(sequence.output_token_ids)
            cached = sequence.num_cached_tokens
            placements.append(Placement(sequence.request_id, slot, outputs, sequence.last_token_id, cached))
            if sequence.pages:
                pages.append(PageUpdate(slot, 0, tuple(sequence.pages)))
        self._unplaced = {}
        return placements, pages

    def _decode_rows(self, decoding: Collection[Sequence], pages: list[PageUpdate]) -> DecodeRows:
        """A row for each. It goes by columns and without calls: what stands here runs once per slot and iteration."""
        rows = DecodeRows(
            tuple([sequence.request_id for sequence in decoding]),
            tuple([sequence.slot for sequence in decoding]),
            tuple([sequence.num_scheduled for sequence in decoding]),
        )
        page_size = self.config.page_size
        for sequence, position in zip(decoding, rows.positions, strict=True):
            sequence.num_in_flight += 1
            sequence.num_scheduled = num_scheduled = position + 1
            if not position % page_size:  # its pages are full
                self._take_pages(sequence, 1, pages)
            if num_scheduled >= sequence.num_kv_tokens:  # its last row: the slot is the next plan's to use
                self._vacate(sequence)
        if self._order.counters is not None:
            self._order.counters.charge_outputs(decoding)
        return rows

    def _chunk(self, sequence: Sequence, size: int, pages: list[PageUpdate], now: float) -> PrefillChunk:
        """Its next `size` prompt tokens."""
        start, end = sequence.num_scheduled, sequence.num_scheduled + size
        sequence.num_in_flight += 1
        sequence.num_scheduled = end
        if sequence.first_scheduled_at is None:  # a decode row is never the first
            sequence.first_scheduled_at = now
        lacking = -(-end // self.config.page_size) - len(sequence.pages)
        if lacking > 0:
            self._take_pages(sequence, lacking, pages)
        chunk = PrefillChunk(
            request_id=sequence.request_id,
            slot=sequence.slot,
            start=start,
            token_ids=sequence.token_ids(start, end),
            emits=end == sequence.num_prefill_tokens and sequence.max_tokens > 0,
        )
        if self._order.counters is not None:
            self._order.counters.charge_chunk(sequence.request.tenant, size, chunk.emits)
        if sequence.fully_scheduled:
            self._vacate(sequence)
        return chunk

    def _take_pages(self, sequence: Sequence, count: int, pages: list[PageUpdate]) -> None:
        """Turns `count` promised pages into held ones; the plan tells the device."""
        self._reservation.take(sequence, count)
        new = self._pages.allocate(count)
        pages.append(PageUpdate(sequence.slot, len(sequence.pages), tuple(new)))
        sequence.pages += new
