"""StepFaults: carries out the faults that a fault plan asks of the runner."""

from __future__ import annotations

import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.faults import Fault, failpoint
from jaxserve.runtime.device_errors import out_of_memory
from jaxserve.runtime.kv_pool import SWAP_BLOCK, KVPool, PoolLayout
from jaxserve.runtime.programs import ProgramTable
from jaxserve.scheduler.plan import StepPlan
from jaxserve.tables import TableBuilder


class StepFaults:
    """Made at warm-up, and only where there is a fault plan.

    Args:
      kv: of the pool.
      num_pages: of it.
      programs: to send page ids with.
      builder: knows every slot's pages.
    """

    def __init__(self, kv: PoolLayout, num_pages: int, programs: ProgramTable, builder: TableBuilder) -> None:
        self._page_size = kv.page_size
        self._programs = programs
        self._builder = builder
        self._break = jax.jit(break_pages, donate_argnums=0, out_shardings=kv.sharding)
        ids = programs.put_page_ids(())
        self._break = self._break.lower(kv.abstract(num_pages), ids).compile()

    def strike(self, at: str, plan: StepPlan) -> Fault | None:
        """Passes a place with a plan.

        Returns:
          A fault of kind "nan", to be carried out by `break_rows` once the step has begun.

        Raises:
          JaxRuntimeError: the device is to have no memory; and what `failpoint` raises.
        """
        fault = failpoint(at, iteration=plan.iteration, request_ids=plan.request_ids)
        if fault is not None and fault.do == "out_of_memory":
            raise out_of_memory(at)
        return fault

    def break_rows(self, pool: KVPool, plan: StepPlan, fault: Fault) -> KVPool:
        """Fills the pages of the requests that a fault names with NaN, so that their next step computes it.

        Pages that another row of the plan has too are left: nobody else is to notice.

        Returns:
          The pool; the one given must not be used any more.
        """
        pattern = fault.request_id or "*"
        ends = [(row.request_id, row.slot, row.position + row.num_steps) for row in plan.decode]
        ends += [(chunk.request_id, chunk.slot, chunk.end) for chunk in plan.prefill]
        pages_of = {slot: self._builder.pages_of(slot, -(-end // self._page_size)) for _, slot, end in ends}
        for request_id, slot, _ in ends:
            if fnmatch.fnmatchcase(request_id, pattern):
                others = frozenset().union(*(pages for other, pages in pages_of.items() if other != slot))
                pages = sorted(pages_of[slot] - others)
                for first in range(0, len(pages), SWAP_BLOCK):
                    pool = self._break(pool, self._programs.put_page_ids(pages[first : first + SWAP_BLOCK]))
        return pool


def break_pages(pool: KVPool, ids: jax.Array) -> KVPool:
    """The pool with NaN in pages `ids` (int32[N]), the null page left out; of an int8 pool, in their scales."""

    def fill(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # The null page of padding entries is written as it was.
        where = (ids > 0).reshape(1, -1, *(1 for _ in x.shape[2:]))
        return x.at[:, ids].set(jnp.where(where, jnp.asarray(np.nan, x.dtype), x[:, ids]))

    return jax.tree.map(fill, pool)
