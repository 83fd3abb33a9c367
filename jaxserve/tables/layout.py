"""TableLayout: where each field of the slot tables lies in the two blobs a step receives.

A step gets one int32 blob and one float32 blob, so that an iteration costs two small transfers
however many fields it has. The layout of a bucket is computed once and used from both sides: the
builder writes numpy views, the compiled step reads static slices.

int32 fields (B, T, R, W of the bucket; N = B + R sample rows, decode rows first; G groups of layers):

  decode_position [B]     write index of the row's input token; -1: padding
  decode_slot [B]         row of the per-slot state; the scratch slot for padding
  decode_pages [G, B, W]  page table of each group; page 0 (null) for padding
  prefill_tokens [T]      token ids; 0 for padding
  prefill_position [T]    write indices; 0 for padding
  prefill_row [T]         row of the prefill table a token belongs to; 0 for padding
  prefill_target [T]      the token that follows in the prompt; -1 at its end and for padding
  prefill_starts [R + 1]  row r owns tokens [starts[r], starts[r+1])
  prefill_context [R]     tokens in the cache after this step; 0: padding
  prefill_pages [G, R, W] page tables
  adapter [N]             place of the request's LoRA adapter; 0: none. Only in tables with adapters
  slot [N]                state row that the sampled token is written to; scratch when it is not
  top_k [N]               0: off
  seed_high, seed_low [N] the two words of the request's sampling key
  sample_position [N]     write index the sampled token will have: folded into the key
  flags [N]               bits below

The fields from `slot` on are what the sampler reads: `SAMPLE_INTS`, side by side at the end of the blob.

A plan of several decode steps has a third array, of what bounds each row: `LIMIT_COLUMNS`.

float32 fields: temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty [N].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from jaxserve.tables.buckets import Bucket

FLAG_LIVE = 1
"""The row samples a token that is kept."""
FLAG_LOGPROBS = 2
"""Log-probabilities of the row are wanted."""
FLAG_EDITS = 4
"""Bias and penalties of the row's slot state apply."""
FLAG_HOLD_STOPS = 8
"""The slot's stop ids are held off (min_tokens is not reached)."""
FLAG_PROMPT_LOGPROBS = 16
"""Log-probabilities of the chunk's prompt tokens are wanted (prefill rows)."""

FLAG_MASKED = 32
"""Only tokens of the row's mask may be sampled."""

MAX_STOP_IDS = 8
"""Stop ids of a request that the device can look for itself."""
LIMIT_COLUMNS = 2 + MAX_STOP_IDS
"""Of the int32[B, LIMIT_COLUMNS] that a plan of several steps has beside its blobs: steps of the row (0: padding),
first write index at which a stop id ends it, stop ids (-1: none)."""

SAMPLING_INTS = ("top_k", "seed_high", "seed_low")
"""int32 fields that stay the same while a request holds its slot; they lie side by side."""
SAMPLING_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""All float32 fields; they stay the same too."""
SAMPLE_INTS = ("slot", *SAMPLING_INTS, "sample_position", "flags")
"""int32 fields of the sample rows, in their order at the end of the blob."""


@dataclass(frozen=True)
class TableLayout:
    """Offsets of every field for one bucket.

    Attributes:
      adapters: there is a field `adapter`.
      num_groups: G, groups of layers.
    """

    bucket: Bucket
    adapters: bool = False
    num_groups: int = 1

    @cached_property
    def int_fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Field name -> (offset, shape) in the int32 blob."""
        b = self.bucket
        rows, tokens, seqs, width, samples = (
            b.decode_rows,
            b.prefill_tokens,
            b.prefill_rows,
            b.table_width,
            b.sample_rows,
        )
        return _place(
            {
                "decode_position": (rows,),
                "decode_slot": (rows,),
                "decode_pages": (self.num_groups, rows, width),
                "prefill_tokens": (tokens,),
                "prefill_position": (tokens,),
                "prefill_row": (tokens,),
                "prefill_target": (tokens,),
                "prefill_starts": (seqs + 1 if seqs else 0,),
                "prefill_context": (seqs,),
                "prefill_pages": (self.num_groups, seqs, width),
                **({"adapter": (samples,)} if self.adapters else {}),
                **dict.fromkeys(SAMPLE_INTS, (samples,)),
            }
        )

    @cached_property
    def float_fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Field name -> (offset, shape) in the float32 blob."""
        shape = (self.bucket.sample_rows,)
        return _place(dict.fromkeys(SAMPLING_FLOATS, shape))

    @cached_property
    def int_size(self) -> int:
        """Length of the int32 blob."""
        return _size(self.int_fields)

    @cached_property
    def float_size(self) -> int:
        """Length of the float32 blob."""
        return _size(self.float_fields)

    def unpack(self, ints: Any, floats: Any) -> dict[str, Any]:
        """Fields as views (numpy) or static slices (jax) of the two blobs."""
        return self.unpack_ints(ints) | _fields(floats, self._float_slices)

    def unpack_ints(self, ints: Any) -> dict[str, Any]:
        """Fields of the int32 blob, as `unpack`."""
        return _fields(ints, self._int_slices)

    def unpack_rows(self, ints: Any) -> dict[str, Any]:
        """Fields of the int32 blob that differ by row; those of prefill only where the bucket has any."""
        return _fields(ints, self._row_slices)

    def sample_ints(self, ints: Any) -> Any:
        """`SAMPLE_INTS` of the int32 blob as [fields, N]."""
        return ints[-len(SAMPLE_INTS) * self.bucket.sample_rows :].reshape(len(SAMPLE_INTS), -1)

    def sampling(self, ints: Any, floats: Any) -> tuple[Any, Any]:
        """`SAMPLING_INTS` and `SAMPLING_FLOATS` as two views [fields, N], to be filled in one assignment each."""
        first, rows = self.int_fields[SAMPLING_INTS[0]][0], self.bucket.sample_rows
        end = first + len(SAMPLING_INTS) * rows
        return ints[first:end].reshape(-1, rows), floats.reshape(-1, rows)

    @cached_property
    def _int_slices(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        return _slices(self.int_fields)

    @cached_property
    def _row_slices(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        return [
            place
            for place in self._int_slices
            if place[0] not in SAMPLING_INTS and (self.bucket.prefill_rows or not place[0].startswith("prefill"))
        ]

    @cached_property
    def _float_slices(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        return _slices(self.float_fields)


def sample_fields(ints: Any, floats: Any) -> dict[str, Any]:
    """The sampler's fields, each [N], of `TableLayout.sample_ints` and the float32 blob."""
    floats = floats.reshape(len(SAMPLING_FLOATS), -1)
    return dict(zip(SAMPLE_INTS, ints, strict=True)) | dict(zip(SAMPLING_FLOATS, floats, strict=True))


def _fields(blob: Any, places: list[tuple[str, slice, tuple[int, ...]]]) -> dict[str, Any]:
    return {name: blob[place] if len(shape) == 1 else blob[place].reshape(shape) for name, place, shape in places}


def _place(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    places = {}
    offset = 0
    for name, shape in shapes.items():
        places[name] = (offset, shape)
        offset += prod(shape)
    return places


def _slices(places: dict[str, tuple[int, tuple[int, ...]]]) -> list[tuple[str, slice, tuple[int, ...]]]:
    return [(name, slice(offset, offset + prod(shape)), shape) for name, (offset, shape) in places.items()]


def _size(places: dict[str, tuple[int, tuple[int, ...]]]) -> int:
    return max(offset + prod(shape) for offset, shape in places.values())
