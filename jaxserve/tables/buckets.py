"""Buckets: the few padded shapes that steps are compiled for, and how a plan picks one.

A bucket is (decode rows B, prefill tokens T, prefill rows R, table width W in pages). Programs are
compiled for every bucket of a `BucketTable` before the first request; a plan takes the smallest
bucket that holds it, and a plan that no bucket holds is an error, never a compile.

* decode-only iterations choose among all decode sizes; iterations with prefill run beside the largest
  one, or beside none where its padding would cost more than a quarter of their tokens: programs are few;
* R follows from T: at most `max_prefill_seqs` prompts share a chunk;
* W follows the longest live context of the iteration, not the longest possible one.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import add

from jaxserve.config import SchedulerConfig
from jaxserve.core import MissingBucketError
from jaxserve.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One compiled shape.

    Attributes:
      decode_rows: B, rows of the decode table; 0: none.
      prefill_tokens: T, rows of the prefill token table; 0: none.
      prefill_rows: R, sequences in the prefill table; 0 exactly when T is 0.
      table_width: W, pages per row of all page tables.
    """

    decode_rows: int
    prefill_tokens: int
    prefill_rows: int
    table_width: int

    @property
    def sample_rows(self) -> int:
        """Rows the sampler works on: every decode row, one per prefill row."""
        return self.decode_rows + self.prefill_rows

    @property
    def name(self) -> str:
        """Short name for traces and progress bars."""
        return f"d{self.decode_rows}p{self.prefill_tokens}w{self.table_width}"


class BucketTable:
    """Every bucket of an engine, and the choice among them.

    Args:
      config: scheduler limits; the largest bucket covers the largest legal plan.
      decode, prefill, widths: sizes to compile; ascending defaults when None. The limits themselves
        are always added.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        decode: tuple[int, ...] | None = None,
        prefill: tuple[int, ...] | None = None,
        widths: tuple[int, ...] | None = None,
    ) -> None:
        self._page_size = config.page_size
        self._max_prefill_seqs = config.max_prefill_seqs
        # The budget counts decode rows too, but a prefill-only plan may use all of it.
        max_prefill = min(config.max_num_batched_tokens, config.prefill_chunk * config.max_prefill_seqs)
        self.decode = _sizes("decode_buckets", decode or _powers(config.max_num_seqs, 8, 4), config.max_num_seqs)
        self.prefill = _sizes("prefill_buckets", prefill or _half_then_quarters(max_prefill, 64), max_prefill)
        width = config.pages_per_seq
        first = max(1, 512 // config.page_size)
        self.widths = _sizes("table_width_buckets", widths or _powers(width, first, 4), width)

    def choose(self, *, decode_rows: int, prefill_tokens: int, pages: int) -> Bucket:
        """The smallest bucket holding a plan.

        Args:
          decode_rows: rows that decode.
          prefill_tokens: prompt tokens over all chunks.
          pages: pages of the longest context in the iteration.

        Raises:
          MissingBucketError: no bucket is large enough.
        """
        width = self._fit("table_width", self.widths, pages)
        if prefill_tokens == 0:
            return Bucket(self._fit("decode_rows", self.decode, decode_rows), 0, 0, width)
        tokens = self._fit("prefill_tokens", self.prefill, prefill_tokens)
        self._fit("decode_rows", self.decode, decode_rows)
        beside = self._rows_beside(tokens)
        return self._mixed(beside[-1] if decode_rows else beside[0], tokens, width)

    def of_plan(self, plan: StepPlan) -> Bucket:
        """The smallest bucket holding `plan`, which is not empty; see `choose`."""
        rows = plan.decode
        ends = map(add, rows.positions, rows.num_steps) if rows.num_steps else (max(rows.positions, default=-1) + 1,)
        longest = max(*ends, *(chunk.end for chunk in plan.prefill), 0)
        tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        return self.choose(decode_rows=len(plan.decode), prefill_tokens=tokens, pages=-(-longest // self._page_size))

    def all(self) -> list[Bucket]:
        """Every bucket, largest last: what warm-up compiles."""
        buckets = [Bucket(rows, 0, 0, width) for rows in self.decode for width in self.widths]
        for tokens in self.prefill:
            for rows in self._rows_beside(tokens):
                buckets += [self._mixed(rows, tokens, width) for width in self.widths]
        return sorted(buckets, key=lambda b: (b.prefill_tokens, b.decode_rows, b.table_width))

    def _rows_beside(self, tokens: int) -> tuple[int, ...]:
        """Decode sizes compiled beside `tokens` of prefill, ascending."""
        largest = self.decode[-1]
        return (largest,) if 4 * largest <= tokens else (0, largest)

    def _mixed(self, rows: int, tokens: int, width: int) -> Bucket:
        return Bucket(rows, tokens, min(self._max_prefill_seqs, tokens), width)

    @staticmethod
    def _fit(what: str, sizes: tuple[int, ...], need: int) -> int:
        index = bisect_left(sizes, need)
        if index == len(sizes):
            raise MissingBucketError(f"a plan needs {what} {need}; the largest compiled one is {sizes[-1]}")
        return sizes[index]


def num_programs(buckets: list[Bucket], max_decode_steps: int = 1) -> int:
    """Programs that an engine with these buckets compiles: their steps, a sampler per number of rows, the placement of
    a request in its slot; where plans may have several steps, one more for each bucket of decode rows alone."""
    loops = sum(not bucket.prefill_tokens for bucket in buckets) if max_decode_steps > 1 else 0
    return len(buckets) + len({bucket.sample_rows for bucket in buckets}) + 1 + loops


def _powers(limit: int, first: int, ratio: int) -> tuple[int, ...]:
    """`first`, then times `ratio`, while at most a third of `limit` (a closer size saves little); then `limit`."""
    sizes = []
    size = first
    while 3 * size <= limit:
        sizes.append(size)
        size *= ratio
    return (*sizes, limit)


def _half_then_quarters(limit: int, least: int) -> tuple[int, ...]:
    """Half of `limit`, then a quarter of that, and so on while at least `least`, in whole eights; then `limit`.

    The rest of a prompt, or of several, is spread evenly below the limit, so the step next to it saves the most.
    """
    sizes = [limit]
    size = limit // 2
    while size >= least:
        sizes.append(-(-size // 8) * 8)
        size //= 4
    return tuple(reversed(sizes))


def _sizes(name: str, sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    if any(size < 1 for size in sizes):
        raise ValueError(f"{name} is {sizes}; every size must be at least 1")
    return tuple(sorted({size for size in sizes if size < limit} | {limit}))
