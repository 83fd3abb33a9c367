"""RowPlanner: who is in an iteration becomes rows of its plan.

`Scheduler` decides who that is. Here rows are made, and what they say is counted as done: tokens scheduled,
pages handed out, slots freed of those that need no more rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from jaxserve.scheduler.moves import Moves
from jaxserve.scheduler.plan import DecodeRows, PageUpdate, Placement, PrefillChunk
from jaxserve.scheduler.sequence import Sequence


class RowPlanner(Moves):
    """The scheduler's tables, and the rows made from them."""

    def _new_placements(self) -> tuple[list[Placement], list[PageUpdate]]:
        """Of the requests that took a slot since the last plan, with the pages they bring along."""
        placements, pages = [], []
        for slot, sequence in self._unplaced.items():
            if sequence.num_to_import:
                self._import(sequence)
            outputs = len(sequence.output_token_ids)
            cached = sequence.num_cached_tokens
            placements.append(Placement(sequence.request_id, slot, outputs, sequence.last_token_id, cached))
            for holding in sequence.holdings:
                if holding.num_pages:
                    ids = (0,) * holding.num_passed + tuple(holding.pages)
                    pages.append(PageUpdate(slot, 0, ids, holding.group))
        for sequence, slot, group, first, count in self._passed:
            if sequence.slot == slot and slot not in self._unplaced:
                pages.append(PageUpdate(slot, first, (0,) * count, group))
        self._unplaced = {}
        return placements, pages

    def _decode_rows(self, pages: list[PageUpdate]) -> tuple[DecodeRows, list[int]]:
        """A row for each sequence that decodes, and which of the rows, ascending, are the last of their sequences.

        It goes by columns and without calls: what stands in the loop runs once per slot and iteration.
        """
        batch, page_size = self._decoding, self.config.page_size
        positions: list[int] = []
        full: list[Sequence] = []
        ending: list[Sequence] = []
        for sequence in batch.sequences:
            position = sequence.num_scheduled
            positions.append(position)
            sequence.num_in_flight += 1
            sequence.num_scheduled = num_scheduled = position + 1
            if not position % page_size:  # its pages are full
                full.append(sequence)
            if num_scheduled >= sequence.num_kv_tokens:
                ending.append(sequence)
        if full:
            self._take_page_each(full, pages)
        if self._order.counters is not None:
            self._order.counters.charge_outputs(batch.num_by_tenant)
        rows = DecodeRows(tuple(batch.request_ids), tuple(batch.slots), tuple(positions))
        last_rows = [batch.index(sequence) for sequence in ending]
        for sequence in ending:  # its slot is the next plan's to use
            self._vacate(sequence)
        return rows, last_rows

    def _decode_runs(self, num_steps: int, pages: list[PageUpdate]) -> tuple[DecodeRows, list[int]]:
        """`_decode_rows` of a plan of several steps; each row has as many of them as its sequence has left."""
        batch = self._decoding
        positions: list[int] = []
        steps: list[int] = []
        ending: list[Sequence] = []
        for sequence in batch.sequences:
            position = sequence.num_scheduled
            count = min(num_steps, sequence.num_kv_tokens - position)
            positions.append(position)
            steps.append(count)
            self._reservation.cover(sequence, count)
            sequence.num_in_flight += 1
            sequence.num_scheduled = position + count
            lacking = -(-sequence.num_scheduled // self.config.page_size) - sequence.num_pages
            if lacking > 0:
                self._take_pages(sequence, lacking, pages)
            if sequence.fully_scheduled:
                ending.append(sequence)
        if self._order.counters is not None:
            charged: dict[str, int] = {}
            for sequence, count in zip(batch.sequences, steps, strict=True):
                charged[sequence.request.tenant] = charged.get(sequence.request.tenant, 0) + count
            self._order.counters.charge_outputs(charged)
        rows = DecodeRows(tuple(batch.request_ids), tuple(batch.slots), tuple(positions), tuple(steps))
        last_rows = [batch.index(sequence) for sequence in ending]
        for sequence in ending:
            self._vacate(sequence)
        return rows, last_rows

    def _chunk(self, sequence: Sequence, size: int, pages: list[PageUpdate], now: float) -> PrefillChunk:
        """Its next `size` prompt tokens."""
        start, end = sequence.num_scheduled, sequence.num_scheduled + size
        sequence.num_in_flight += 1
        sequence.num_scheduled = end
        if sequence.first_scheduled_at is None:  # a decode row is never the first
            sequence.first_scheduled_at = now
        lacking = -(-end // self.config.page_size) - sequence.num_pages
        if lacking > 0:
            self._take_pages(sequence, lacking, pages)
        if sequence.request.exports_kv:
            self._export(sequence)
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
        elif sequence.decode_ready:
            del self._prefilling[sequence.slot]
            self._decoding.join(sequence)
        return chunk

    def _take_pages(self, sequence: Sequence, count: int, pages: list[PageUpdate]) -> None:
        """Turns `count` promised pages of every group into held ones; the plan tells the device."""
        for holding in sequence.holdings:
            self._reservation.take(sequence, holding, count)
            new = self._pages.allocate(count, passing=holding.gives_back)
            pages.append(PageUpdate(sequence.slot, holding.num_pages, tuple(new), holding.group))
            holding.pages += new

    def _take_page_each(self, sequences: Items[Sequence], pages: list[PageUpdate]) -> None:
        """`_take_pages` of one page in every group for several sequences."""
        for group in range(len(self._windows)):
            holdings = [sequence.holdings[group] for sequence in sequences]
            self._reservation.take_one_each(holdings)
            new = self._pages.allocate(len(sequences))
            for sequence, holding, page in zip(sequences, holdings, new, strict=True):
                held = holding.pages
                pages.append(PageUpdate(sequence.slot, holding.num_passed + len(held), (page,), group))
                held.append(page)
                if holding.gives_back:
                    self._pages.will_pass(page)
