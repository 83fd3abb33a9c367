"""TableBuilder: a StepPlan becomes two padded blobs.

The builder mirrors on the host what the scheduler decided per slot: a page table row and the
request's sampling columns. Placements and page updates change the mirror, so an iteration's work is
what changed plus one gather of the live rows; nothing is rebuilt from sequences. Numpy calls cost more than
what they do at these sizes, so columns that lie side by side in the blobs are gathered together, and a plan of the
rows of the one before, each a token further, is that one's blob with positions and new pages changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.scheduler.plan import DecodeRows, PrefillChunk, StepPlan
from jaxserve.tables.buckets import Bucket, BucketTable
from jaxserve.tables.layout import (
    FLAG_EDITS,
    FLAG_HOLD_STOPS,
    FLAG_LIVE,
    FLAG_LOGPROBS,
    FLAG_MASKED,
    FLAG_PROMPT_LOGPROBS,
    LIMIT_COLUMNS,
    MAX_STOP_IDS,
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    TableLayout,
)

_HOLD_STOPS = np.int32(FLAG_HOLD_STOPS)
_sampling_floats = attrgetter(*SAMPLING_FLOATS[1:])  # without the temperature


def _as_int32(word: int) -> int:
    """The signed number of the same 32 bits."""
    return word - 2**32 if word >= 2**31 else word


@dataclass(slots=True, eq=False)
class StepTables:
    """One iteration's inputs.

    Attributes:
      bucket: the compiled shape they are padded to.
      ints: int32[layout.int_size], see `TableLayout`.
      floats: float32[layout.float_size]; the same array as long as its values are, and not to be written to.
      limits: int32[B, LIMIT_COLUMNS] of a plan of several decode steps, else None.
    """

    bucket: Bucket
    ints: NDArray[np.int32]
    floats: NDArray[np.float32]
    limits: NDArray[np.int32] | None = None


@dataclass(slots=True)
class _Decoded:
    """The last plan, of decode rows alone with a step each.

    Attributes:
      slots: of its rows.
      longest: most tokens of a row's context.
      held: whether a row's stop ids were held off.
    """

    tables: StepTables
    slots: tuple[int, ...]
    longest: int
    held: bool


class TableBuilder:
    """Per-slot mirrors and the packing of plans.

    Args:
      config: slots, page size and lengths.
      buckets: compiled shapes.
      adapters: rows have LoRA adapters.
    """

    def __init__(self, config: SchedulerConfig, buckets: BucketTable, *, adapters: bool = False) -> None:
        self._num_pages = config.num_pages
        self._page_size = config.page_size
        # By group of layers: where pages are given back, the null page takes their place.
        self._least_pages = tuple(0 if window else 1 for window in config.windows)
        self._scratch_slot = config.max_num_seqs
        self._buckets = buckets
        self._layouts: dict[Bucket, TableLayout] = {}
        self._paddings: dict[Bucket, StepTables] = {}
        # With a last row or column for the scratch slot, so that padding is gathered like everything else.
        slots = config.max_num_seqs + 1
        self._pages = np.zeros((len(config.windows), slots, config.pages_per_seq), np.int32)
        self._pages_of = list(self._pages)  # the same, by group
        # A row per field, as in the blobs.
        self._ints = np.zeros((len(SAMPLING_INTS), slots), np.int32)
        self._floats = np.zeros((len(SAMPLING_FLOATS), slots), np.float32)
        for name in ("top_p", "repetition_penalty"):
            self._floats[SAMPLING_FLOATS.index(name), self._scratch_slot] = 1.0
        self._flags = np.zeros(slots, np.int32)
        # First write index at which stop ids are allowed again: prompt length + min_tokens.
        self._stops_held_below = np.zeros(slots, np.int32)
        # Of free-running requests, where plans may have several steps.
        self._stop_ids = np.full((slots, MAX_STOP_IDS), -1, np.int32) if config.max_decode_steps > 1 else None
        self._adapter_places = np.zeros(slots, np.int32) if adapters else None
        self._requests: list[Request | None] = [None] * slots
        self._last: _Decoded | None = None
        self._last_floats: dict[int, tuple[bytes, NDArray[np.float32]]] = {}  # by sample rows

    def reset(self) -> None:
        """Forgets the last plan, which is not to be run; the next one places every request of its rows."""
        self._last = None

    def pages_of(self, slot: int, count: int) -> frozenset[int]:
        """A slot's first `count` pages in each group, but those that were given back; for faults on purpose."""
        return frozenset(self._pages[:, slot, :count].ravel().tolist()) - {0}

    def layout(self, bucket: Bucket) -> TableLayout:
        """The bucket's field places."""
        layout = self._layouts.get(bucket)
        if layout is None:
            layout = self._layouts[bucket] = TableLayout(bucket, self._adapter_places is not None, len(self._pages))
        return layout

    def empty_limits(self, bucket: Bucket) -> NDArray[np.int32]:
        """`StepTables.limits` under which every row has one step and ends by no id."""
        limits = np.full((bucket.decode_rows, LIMIT_COLUMNS), -1, np.int32)
        limits[:, 0] = 1
        return limits

    def empty(self, bucket: Bucket) -> StepTables:
        """Tables in which every row is padding: writes only to the null page and the scratch slot."""
        padding = self._paddings.get(bucket)
        if padding is None:
            padding = self._paddings[bucket] = self._padding(bucket)
        # The device may still read the blobs of the steps in flight, so each step gets its own.
        return StepTables(bucket, padding.ints.copy(), padding.floats.copy())

    def _padding(self, bucket: Bucket) -> StepTables:
        layout = self.layout(bucket)
        ints = np.zeros(layout.int_size, np.int32)
        floats = np.zeros(layout.float_size, np.float32)
        fields = layout.unpack(ints, floats)
        fields["decode_position"].fill(-1)
        fields["decode_slot"].fill(self._scratch_slot)
        fields["slot"].fill(self._scratch_slot)
        fields["prefill_target"].fill(-1)
        fields["top_p"].fill(1.0)
        fields["repetition_penalty"].fill(1.0)
        return StepTables(bucket, ints, floats)

    def build(self, plan: StepPlan, request_of: Callable[[str], Request]) -> StepTables:
        """Packs `plan`; applies its placements and page updates to the mirrors first.

        Args:
          plan: not empty.
          request_of: the live request of an id.

        Raises:
          MissingBucketError: no compiled shape holds the plan.
        """
        last, self._last = self._last, None
        self._apply(plan, request_of)
        if last is not None and not (plan.prefill or plan.placements) and plan.num_steps == 1:
            tables = self._moved_on(last, plan)
            if tables is not None:
                return tables
        positions = np.fromiter(plan.decode.positions, np.int32, len(plan.decode))
        bucket = self._buckets.of_plan(plan)
        tables = self.empty(bucket)
        layout = self.layout(bucket)
        fields = layout.unpack_rows(tables.ints)
        self._fill_decode(plan.decode.slots, positions, fields)
        self._fill_prefill(plan.prefill, fields, bucket)
        held = self._fill_samples(*layout.sampling(tables.ints, tables.floats), fields)
        self._silence_prompts(plan.prefill, fields, bucket)
        tables = StepTables(bucket, tables.ints, self._kept(tables.floats))
        if plan.num_steps > 1:
            return replace(tables, limits=self._limits(plan.decode, bucket))
        if not plan.prefill:
            self._last = _Decoded(tables, plan.decode.slots, int(positions.max()) + 1, bool(held.any()))
        return tables

    def _moved_on(self, last: _Decoded, plan: StepPlan) -> StepTables | None:
        """The tables of a plan whose rows are those of `last`, a token further; None where it is another."""
        rows, bucket = plan.decode, last.tables.bucket
        longest = last.longest + 1
        if last.held or rows.slots != last.slots or longest > bucket.table_width * self._page_size:
            return None
        layout, count = self.layout(bucket), len(rows.slots)
        ints = last.tables.ints.copy()  # the device may still read the last one's
        for name in ("decode_position", "sample_position"):
            first, _ = layout.int_fields[name]
            ints[first : first + count] += 1
        assert ints[layout.int_fields["decode_position"][0]] == rows.positions[0], (plan.iteration, rows.positions[0])
        if plan.pages:
            first, (_, num_rows, width) = layout.int_fields["decode_pages"]
            for slot, index, page_ids, group in plan.pages:
                if slot not in rows.slots:
                    continue
                assert index + len(page_ids) <= width, (plan.iteration, slot, index, page_ids, width)
                at = first + (group * num_rows + rows.slots.index(slot)) * width + index
                ints[at : at + len(page_ids)] = page_ids
        tables = StepTables(bucket, ints, last.tables.floats)
        last.tables, last.longest, self._last = tables, longest, last
        return tables

    def _kept(self, floats: NDArray[np.float32]) -> NDArray[np.float32]:
        """The array of the last step with so many rows, if its values are these."""
        values, last = floats.tobytes(), self._last_floats.get(len(floats))
        if last is not None and last[0] == values:
            return last[1]
        self._last_floats[len(floats)] = values, floats
        return floats

    def _apply(self, plan: StepPlan, request_of: Callable[[str], Request]) -> None:
        for placement in plan.placements:
            self._place(placement.slot, request_of(placement.request_id))
        pages_of, num_pages, least_pages = self._pages_of, self._num_pages, self._least_pages
        for slot, first, page_ids, group in plan.pages:
            pages, least = pages_of[group], least_pages[group]
            # Kernels do not check ids: one out of range would read or write some other memory.
            if len(page_ids) == 1:  # most updates: the next page of a slot whose last one is full
                (page,) = page_ids
                assert least <= page < num_pages, (slot, group, first, page, num_pages)
                pages[slot, first] = page
            else:
                assert least <= min(page_ids) <= max(page_ids) < num_pages, (slot, group, first, page_ids, num_pages)
                pages[slot, first : first + len(page_ids)] = page_ids

    def _place(self, slot: int, request: Request) -> None:
        params = request.params
        self._requests[slot] = request
        top_k = params.top_k if 0 < params.top_k < 2**31 else 0
        seed = request.seed & (2**64 - 1)
        self._ints[:, slot] = top_k, _as_int32(seed >> 32), _as_int32(seed & 0xFFFFFFFF)
        temperature = 0.0 if params.greedy else params.temperature
        self._floats[:, slot] = (temperature, *_sampling_floats(params))
        self._flags[slot] = (
            FLAG_LIVE
            | (FLAG_LOGPROBS if params.logprobs is not None else 0)
            | (FLAG_EDITS if params.edits_logits else 0)
            | (FLAG_PROMPT_LOGPROBS if params.prompt_logprobs is not None else 0)
            | (FLAG_MASKED if request.masked else 0)
        )
        self._stops_held_below[slot] = request.num_prompt_tokens + params.min_tokens
        if self._adapter_places is not None:
            self._adapter_places[slot] = request.adapter_place
        if self._stop_ids is not None and request.free_running:
            stop_ids = sorted(request.stop_ids)
            self._stop_ids[slot, : len(stop_ids)] = stop_ids
            self._stop_ids[slot, len(stop_ids) :] = -1

    def _fill_decode(
        self, of_rows: tuple[int, ...], positions: NDArray[np.int32], fields: dict[str, NDArray[np.int32]]
    ) -> None:
        count = len(of_rows)
        slots = np.fromiter(of_rows, np.int32, count)
        fields["decode_position"][:count] = positions
        fields["decode_slot"][:count] = fields["slot"][:count] = slots
        fields["sample_position"][:count] = positions + 1
        for tables, pages in zip(self._pages_of, fields["decode_pages"], strict=True):
            tables[:, : pages.shape[1]].take(slots, axis=0, out=pages[:count], mode="clip")

    def _limits(self, rows: DecodeRows, bucket: Bucket) -> NDArray[np.int32]:
        assert self._stop_ids is not None, "a plan has several steps; max_decode_steps is 1"
        count = len(rows)
        slots = np.fromiter(rows.slots, np.int32, count)
        limits = np.zeros((bucket.decode_rows, LIMIT_COLUMNS), np.int32)
        limits[:count, 0] = rows.num_steps
        limits[:count, 1] = self._stops_held_below[slots]
        limits[:count, 2:] = self._stop_ids[slots]
        return limits

    def _fill_prefill(
        self, chunks: tuple[PrefillChunk, ...], fields: dict[str, NDArray[np.int32]], bucket: Bucket
    ) -> None:
        first = 0
        for index, chunk in enumerate(chunks):
            row, last = bucket.decode_rows + index, first + len(chunk.token_ids)
            fields["prefill_tokens"][first:last] = np.fromiter(chunk.token_ids, np.int32, last - first)
            fields["prefill_position"][first:last] = np.arange(chunk.start, chunk.end)
            fields["prefill_row"][first:last] = index
            fields["prefill_starts"][index + 1 :] = last
            fields["prefill_context"][index] = fields["sample_position"][row] = chunk.end
            fields["prefill_pages"][:, index] = self._pages[:, chunk.slot, : bucket.table_width]
            fields["slot"][row] = chunk.slot
            first = last

    def _fill_samples(
        self, ints: NDArray[np.int32], floats: NDArray[np.float32], fields: dict[str, NDArray[np.int32]]
    ) -> NDArray[np.bool_]:
        """What depends on the slot alone, for decode and prefill rows at once; padding is the scratch slot's.

        Args:
          ints, floats: sampling fields, see `TableLayout.sampling`.

        Returns:
          bool[N]: whose stop ids are held off.
        """
        slots = fields["slot"]
        # Every slot is in range; with any other mode `take` would fill a buffer and copy it to `out`.
        self._ints.take(slots, axis=1, out=ints, mode="clip")
        self._floats.take(slots, axis=1, out=floats, mode="clip")
        if self._adapter_places is not None:
            self._adapter_places.take(slots, out=fields["adapter"], mode="clip")
        held = fields["sample_position"] < self._stops_held_below.take(slots, mode="clip")
        np.bitwise_or(self._flags.take(slots, mode="clip"), held * _HOLD_STOPS, out=fields["flags"])
        return held

    def _silence_prompts(
        self, chunks: tuple[PrefillChunk, ...], fields: dict[str, NDArray[np.int32]], bucket: Bucket
    ) -> None:
        """Chunks short of their prompts' ends keep no token; where scores are wanted, the tokens to be scored."""
        first = 0
        for row, chunk in enumerate(chunks, bucket.decode_rows):
            if not chunk.emits:
                fields["flags"][row] &= FLAG_PROMPT_LOGPROBS
                fields["slot"][row] = self._scratch_slot
            if fields["flags"][row] & FLAG_PROMPT_LOGPROBS:
                self._fill_targets(chunk, fields["prefill_target"][first:])
            first += len(chunk.token_ids)

    def _fill_targets(self, chunk: PrefillChunk, targets: NDArray[np.int32]) -> None:
        request = self._requests[chunk.slot]
        assert request is not None, f"slot {chunk.slot} has no request"
        following = request.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
        targets[: len(following)] = following
