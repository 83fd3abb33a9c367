"""PageTransfers: K/V pages between this engine's pool and other engines, as a plan's imports and exports say.

    export   gather(pool, ids) -> block     after the step that fills the pages; blocks go to the request's `PageSink`
    import   scatter(pool, block, ids)      before the step that reads them; blocks are made of its `PageSource`

Pages go in blocks of at most `SWAP_BLOCK`, each of one request and one group of layers, by the programs that swap
pages. Both stand in the device's stream like steps, so a page that was exported may be written by the next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.core import Request
from jaxserve.runtime.kv_pool import SWAP_BLOCK, KVPool
from jaxserve.runtime.programs import ProgramTable
from jaxserve.scheduler.plan import PageMove, StepPlan

MAX_OUTGOING = 8
"""Blocks that may lie on the device on their way to the host, beside the pool; then the oldest is waited for."""


@dataclass(frozen=True, slots=True, eq=False)
class PageBlock:
    """Pages `first`, `first + 1`, ... of a request's tokens in one group of layers.

    Attributes:
      count: pages; arrays on the device may hold more, which mean nothing, arrays of the host hold no others.
      leaves: of the pool, in the order of `jax.tree.leaves`: [layers of a group, pages, ...] each.
    """

    group: int
    first: int
    count: int
    leaves: tuple[Any, ...]


class PageSink(Protocol):
    """Where the pages of one request go; called on the engine's thread, and does not wait."""

    on_device: bool
    """Takes blocks as the device's arrays as soon as they are on their way, else as the host's once they are there."""

    def put(self, block: PageBlock) -> None:
        """One more block; those of a group come in order."""


class PageSource:
    """Pages that came from elsewhere, for the requests of one prompt.

    Args:
      num_tokens: of the prompt that they hold.
      blocks: those pages, whole, in any order.
      on_released: called once, from any thread, when no request needs them any more.
    """

    def __init__(
        self, num_tokens: int, blocks: Items[PageBlock], on_released: Callable[[], None] = lambda: None
    ) -> None:
        self.num_tokens = num_tokens
        self._blocks = list(blocks)
        self._on_released = on_released
        self._users: set[str] = set()
        self._lock = threading.Lock()
        self._released = False

    @property
    def blocks(self) -> list[PageBlock]:
        """The pages; none once they are released."""
        return self._blocks

    def use(self, request_ids: Items[str]) -> None:
        """Requests that will need them."""
        with self._lock:
            self._users.update(request_ids)

    def release(self) -> None:
        """Nobody needs them."""
        with self._lock:
            self._users.clear()
        self.done("")

    def done(self, request_id: str) -> None:
        """A request has them in the pool, or has ended."""
        with self._lock:
            self._users.discard(request_id)
            if self._users or self._released:
                return
            self._released, self._blocks = True, []
        self._on_released()


class PageTransfers:
    """Runs the imports and exports of plans.

    Args:
      block_shapes: of a block of `SWAP_BLOCK` pages.
      programs: with compiled swaps.
    """

    def __init__(self, block_shapes: KVPool, programs: ProgramTable) -> None:
        self._leaf_shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(block_shapes)]
        self._structure = jax.tree.structure(block_shapes)
        self._programs = programs
        # With the number of the plan they are of.
        self._outgoing: deque[tuple[int, PageSink, PageBlock]] = deque()

    def warm_up(self, pool: KVPool) -> KVPool:
        """Runs both programs once, on the null page."""
        ids = self._programs.put_page_ids(())
        block = self._programs.gather(pool, ids)
        host = jax.tree.map(np.asarray, block)
        return self._programs.scatter(pool, self._programs.put_pages(host), ids)

    def prepare(self, plan: StepPlan, request_of: Callable[[str], Request]) -> PreparedMoves:
        """What `plan` moves, and between whom; later ends of its requests change nothing about it."""
        imports, exports = [], []
        for move in plan.imports:
            source = request_of(move.request_id).kv
            assert isinstance(source, PageSource), f"{move.request_id} imports pages and has none"
            imports.append((move, source.blocks))
        for move in plan.exports:
            sink = request_of(move.request_id).kv
            assert sink is not None, f"{move.request_id} exports pages to nobody"
            exports.append((move, sink))
        # A request in its slot has all it needs, be it imported by this plan or found in the prefix cache.
        requests = [request_of(placement.request_id) for placement in plan.placements]
        placed = [(each.request_id, each.kv) for each in requests if isinstance(each.kv, PageSource)]
        return PreparedMoves(imports, placed, exports)

    def run_imports(self, pool: KVPool, moves: PreparedMoves) -> KVPool:
        """Starts the imports of one plan; sources that none of its requests needs any more are told.

        Returns:
          The pool as the plan's step is to see it; `pool` itself must not be used any more.
        """
        for move, blocks in moves.imports:
            for first, ids in _parts(move):
                block = self._block_of(blocks, move.group, first, len(ids))
                pool = self._programs.scatter(pool, block, self._programs.put_page_ids(ids))
        for request_id, source in moves.placed:
            source.done(request_id)
        return pool

    def run_exports(self, pool: KVPool, iteration: int, moves: PreparedMoves) -> None:
        """Starts the exports of plan `iteration`, whose step has been dispatched."""
        for move, sink in moves.exports:
            for first, ids in _parts(move):
                leaves = jax.tree.leaves(self._programs.gather(pool, self._programs.put_page_ids(ids)))
                block = PageBlock(move.group, first, len(ids), tuple(leaves))
                if sink.on_device:
                    sink.put(block)
                    continue
                for array in leaves:
                    array.copy_to_host_async()
                if len(self._outgoing) == MAX_OUTGOING:
                    self._deliver_oldest()
                self._outgoing.append((iteration, sink, block))

    def settle(self, iteration: int) -> None:
        """Hands over the blocks of plans up to `iteration`, whose steps are done."""
        while self._outgoing and self._outgoing[0][0] <= iteration:
            self._deliver_oldest()

    def reset(self) -> None:
        """Forgets the blocks on their way: a step has failed, and the requests that export them end."""
        self._outgoing.clear()

    def _deliver_oldest(self) -> None:
        _, sink, block = self._outgoing.popleft()
        # A copy of its pages where others lie beside them, so that what waits has the bytes that are counted for it.
        leaves = tuple(np.ascontiguousarray(np.asarray(leaf)[:, : block.count]) for leaf in block.leaves)
        sink.put(PageBlock(block.group, block.first, block.count, leaves))

    def _block_of(self, blocks: Items[PageBlock], group: int, first: int, count: int) -> KVPool:
        """Pages [first, first + count) on the device, in a block of `SWAP_BLOCK`."""
        parts = [each for each in blocks if each.group == group and each.first < first + count]
        parts = [each for each in parts if first < each.first + each.count]
        whole = len(parts) == 1 and (parts[0].first, parts[0].count) == (first, count)
        if whole and isinstance(parts[0].leaves[0], jax.Array):
            return jax.tree.unflatten(self._structure, parts[0].leaves)
        leaves = [np.zeros(shape, dtype) for shape, dtype in self._leaf_shapes]
        found = 0
        for part in parts:
            start, end = max(first, part.first), min(first + count, part.first + part.count)
            found += end - start
            for leaf, source in zip(leaves, part.leaves, strict=True):
                there = np.asarray(source)[:, start - part.first : end - part.first]
                leaf[:, start - first : end - first] = there
        assert found == count, f"{found} of the pages {first} to {first + count} of group {group} came"
        return self._programs.put_pages(jax.tree.unflatten(self._structure, leaves))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMoves:
    """Imports with their pages, requests in new slots with their sources, and exports with their sinks."""

    imports: list[tuple[PageMove, list[PageBlock]]]
    placed: list[tuple[str, PageSource]]
    exports: list[tuple[PageMove, Any]]


def _parts(move: PageMove) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The number of the first page, and the ids, of each block of a move; blocks begin at multiples of their size."""
    at, end = move.first, move.first + len(move.page_ids)
    while at < end:
        stop = min(end, (at // SWAP_BLOCK + 1) * SWAP_BLOCK)
        yield at, move.page_ids[at - move.first : stop - move.first]
        at = stop
