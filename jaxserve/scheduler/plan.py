"""StepPlan: what one iteration does, as frozen data that turns into JSON and back.

A plan says everything the device side needs and nothing it has to look up: which rows decode, which
prompt chunks run, which pages a slot gained. It holds no tokens beyond the chunks' own, no clock and
no arrays, so a trace of plans is a complete record of an engine's decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, overload


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token, or several in a row, for a slot whose prompt is computed.

    Attributes:
      slot: row of the device's per-slot state; its last sampled token is the input.
      position: write index of that input token; the context is `position + 1` tokens.
      num_steps: tokens at most, each of which is fed to sample the next.
    """

    request_id: str
    slot: int
    position: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class DecodeRows(Items[DecodeRow]):
    """The decode rows of a plan, kept by column.

    A plan has one per slot, in every iteration, and whoever reads them all wants columns: the tables fill
    arrays, the trace lists ids. So the columns are what is stored, and a `DecodeRow` is made for those who
    ask for one; making them all would cost more than deciding on them. `num_steps` is empty where each row has one.
    """

    request_ids: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    num_steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[DecodeRow]) -> DecodeRows:
        """The same rows, by column."""
        rows = tuple(rows)
        steps = tuple(row.num_steps for row in rows)
        return cls(
            tuple(row.request_id for row in rows),
            tuple(row.slot for row in rows),
            tuple(row.position for row in rows),
            steps if any(count > 1 for count in steps) else (),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens at most, of all rows and steps."""
        return sum(self.num_steps) if self.num_steps else len(self.request_ids)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[DecodeRow]:
        return map(DecodeRow, self.request_ids, self.slots, self.positions, self.num_steps or repeat(1))

    @overload
    def __getitem__(self, index: int) -> DecodeRow: ...
    @overload
    def __getitem__(self, index: slice) -> DecodeRows: ...
    def __getitem__(self, index: int | slice) -> DecodeRow | DecodeRows:
        if isinstance(index, slice):
            return DecodeRows(self.request_ids[index], self.slots[index], self.positions[index], self.num_steps[index])
        steps = self.num_steps[index] if self.num_steps else 1
        return DecodeRow(self.request_ids[index], self.slots[index], self.positions[index], steps)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens [start, start + len(token_ids)) of one request.

    Attributes:
      start: write index of the first token.
      token_ids: the chunk's tokens (after recompute they may include earlier outputs).
      emits: the chunk reaches the prompt's end, so its last position samples a token.
    """

    request_id: str
    slot: int
    start: int
    token_ids: tuple[int, ...]
    emits: bool

    @property
    def end(self) -> int:
        """One more than the write index of the last token."""
        return self.start + len(self.token_ids)


class PageUpdate(NamedTuple):
    """Pages written into a slot's page table from index `first` on; order is token order.

    Page 0, the null page, stands for a page that was given back: no layer of its group sees its tokens any
    more. A slot has a table for each group of layers.
    """

    slot: int
    first: int
    page_ids: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A request took a slot in this iteration: the device resets the slot's sampling state.

    `num_output_tokens` is above 0 for one that was preempted; `last_token_id` is then the token its
    next decode row feeds, or -1 when a prompt chunk comes first. `num_cached_tokens` need no chunk: their
    K/V was found in the prefix cache.
    """

    request_id: str
    slot: int
    num_output_tokens: int
    last_token_id: int
    num_cached_tokens: int = 0


class PageSwap(NamedTuple):
    """Pages of one request, of all groups of layers, copied between the KV pool and the host pool, pairwise.

    `out` is true from the device to the host. It happens on the device after every earlier plan and before
    the rows of its own, so what a step in flight writes is copied, and the pages it frees may be used at once.
    """

    request_id: str
    out: bool
    page_ids: tuple[int, ...]
    host_page_ids: tuple[int, ...]


class PageMove(NamedTuple):
    """Pages of one request in one group of layers whose K/V comes from another engine, or goes to one.

    They are pages `first`, `first + 1`, ... of the request's tokens. An import happens on the device before the rows of
    its plan, an export after them.
    """

    request_id: str
    group: int
    first: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, in execution order: swaps, imports, placements, page updates, rows and chunks, exports.

    Swaps are in the order in which they were decided. Decode rows and prefill chunks are each in the order in
    which their requests took their slots. An empty plan (no decode row and no chunk) is not dispatched.
    `iteration` counts dispatched plans from 0. `num_steps` is above 1 only where there are no chunks: the device
    feeds each row's token back so many times at most, until the row's own count or an id that stops it.
    """

    iteration: int
    decode: DecodeRows = DecodeRows()
    prefill: tuple[PrefillChunk, ...] = ()
    placements: tuple[Placement, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    preempted: tuple[str, ...] = ()
    swaps: tuple[PageSwap, ...] = ()
    num_steps: int = 1
    imports: tuple[PageMove, ...] = ()
    exports: tuple[PageMove, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing to run."""
        return not self.decode and not self.prefill

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of its rows: those that decode, then those of the chunks."""
        return (*self.decode.request_ids, *[chunk.request_id for chunk in self.prefill])

    @property
    def num_tokens(self) -> int:
        """Tokens of this iteration's first step, against the token budget; later steps have no more."""
        return len(self.decode) + self.num_prefill_tokens

    @property
    def num_copied_pages(self) -> int:
        """Pages that are copied to the host or from it before the rows: swapped and imported ones."""
        if not self.swaps and not self.imports:
            return 0
        return sum([len(swap.page_ids) for swap in self.swaps]) + sum([len(move.page_ids) for move in self.imports])

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens."""
        return sum([len(chunk.token_ids) for chunk in self.prefill]) if self.prefill else 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device answered to one plan.

    Attributes:
      decode_tokens: sampled id per decode row, in plan order.
      prefill_tokens: sampled id per chunk, in plan order; meaningless where the chunk does not emit.
      decode_runs: of a plan of several steps, instead of `decode_tokens`: per decode row its tokens in order, the one
        that stopped it being the last; none where the token fed to it had ended its request.
      Logprob data travels beside this (see `jaxserve.runtime.StepOutput`): the scheduler needs none.
    """

    decode_tokens: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    decode_runs: tuple[tuple[int, ...], ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that ran: as many as the row with the most tokens has."""
        return max(map(len, self.decode_runs)) if self.decode_runs else 1

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of all decode rows and steps."""
        return sum(map(len, self.decode_runs)) if self.decode_runs else len(self.decode_tokens)


@dataclass(slots=True)
class TokenEvent:
    """One sampled token of a live request, or its end.

    Not frozen, as there is one per token and a frozen dataclass takes several times as long to make; nobody
    changes it all the same.

    Attributes:
      token_id: the token; None for an end without a token (abort, expiry, max_tokens 0).
      row: index into the plan's decode rows (`source == "decode"`) or chunks (`"prefill"`), to find logprobs.
      finish_reason: a `FinishReason` value, or None while it goes on.
      stop_token_id: the EOS or stop id that ended it.
    """

    request_id: str
    token_id: int | None
    source: str = ""
    row: int = -1
    finish_reason: str | None = None
    stop_token_id: int | None = None
