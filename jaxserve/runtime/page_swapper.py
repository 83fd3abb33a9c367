"""PageSwapper: copies pages between the KV pool and the host pool, for requests that were swapped out.

Pages go in blocks of `SWAP_BLOCK`, one compiled program each way, so that nothing compiles while serving:

    out   gather(pool, ids) -> block        starts its way to the host at once; `settle` stores it later
    in    scatter(pool, block, ids) -> pool the pool is donated and updated in place

Both stand in the device's stream like steps: a gather sees what every step before it wrote, and a page it
has read may be written by the next step. The host pool is ordinary memory, committed as it is first used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

import jax
import numpy as np

from jaxserve.faults import failpoint
from jaxserve.runtime.kv_pool import SWAP_BLOCK, KVPool, PoolLayout
from jaxserve.runtime.programs import ProgramTable
from jaxserve.scheduler.plan import PageSwap


class PageSwapper:
    """Owns the host pool.

    Args:
      kv: of the KV pool.
      num_host_pages: pages of the host pool.
      programs: with compiled swaps.
    """

    def __init__(self, kv: PoolLayout, num_host_pages: int, programs: ProgramTable) -> None:
        self._programs = programs
        shapes = kv.abstract(num_host_pages)
        self._host: KVPool = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self._outgoing: deque[tuple[KVPool, Items[int], int]] = deque()  # blocks, their host pages and their plans

    def run(self, pool: KVPool, iteration: int, swaps: Items[PageSwap]) -> KVPool:
        """Starts the copies of one plan, in order; `iteration` is the plan's number.

        Returns:
          The pool as the plan's step is to see it; `pool` itself must not be used any more.
        """
        for swap in swaps:
            if swap.out:
                failpoint("swap.out", iteration=iteration, request_ids=(swap.request_id,))
            for first in range(0, len(swap.page_ids), SWAP_BLOCK):
                pages, host_pages = (ids[first : first + SWAP_BLOCK] for ids in (swap.page_ids, swap.host_page_ids))
                if swap.out:
                    self._send(pool, iteration, pages, host_pages)
                else:
                    pool = self._fetch(pool, pages, host_pages)
        return pool

    def settle(self, iteration: int | None = None) -> None:
        """Stores the blocks on their way, of plans up to `iteration` if given; waits for the device to finish them.

        Blocks of a plan whose step is done are finished; those of later plans would have to be waited for.
        """
        while self._outgoing and (iteration is None or self._outgoing[0][2] <= iteration):
            block, host_pages, _ = self._outgoing.popleft()
            for stored, new in zip(jax.tree.leaves(self._host), jax.tree.leaves(block), strict=True):
                stored[:, host_pages] = np.asarray(new)[:, : len(host_pages)]

    def reset(self) -> None:
        """Forgets the blocks on their way: a step has failed, and nobody needs what the host pool holds."""
        self._outgoing.clear()

    def warm_up(self, pool: KVPool) -> KVPool:
        """Runs both programs once, on the null page."""
        block = self._programs.gather(pool, self._programs.put_page_ids(()))
        return self._programs.scatter(pool, block, self._programs.put_page_ids(()))

    def _send(self, pool: KVPool, iteration: int, pages: Items[int], host_pages: Items[int]) -> None:
        block = self._programs.gather(pool, self._programs.put_page_ids(pages))
        for array in jax.tree.leaves(block):
            array.copy_to_host_async()
        self._outgoing.append((block, host_pages, iteration))

    def _fetch(self, pool: KVPool, pages: Items[int], host_pages: Items[int]) -> KVPool:
        # A request hardly ever comes back before the step is done that sent it away; then this waits.
        if any(not set(host_pages).isdisjoint(on_their_way) for _, on_their_way, _ in self._outgoing):
            self.settle()

        def block_of(stored: np.ndarray) -> np.ndarray:
            block = np.zeros((stored.shape[0], SWAP_BLOCK, *stored.shape[2:]), stored.dtype)
            block[:, : len(host_pages)] = stored[:, host_pages]
            return block

        block = jax.tree.map(block_of, self._host)
        return self._programs.scatter(pool, self._programs.put_pages(block), self._programs.put_page_ids(pages))
