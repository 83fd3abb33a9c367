"""Preemption: what a victim gives up.

| name        | its K/V                                 | coming back costs                                |
|-------------|-----------------------------------------|--------------------------------------------------|
| `pause`     | stays in its pages                      | nothing; the pages are not free meanwhile        |
| `swap`      | is copied to the host pool              | two copies of its pages                          |
| `recompute` | is dropped                              | prefill of all its tokens                        |
| `auto`      | the cheaper of swap and recompute       |                                                  |

The host pool is bounded: where it has no room, `swap` and `auto` recompute.
"""

from __future__ import annotations

from jaxserve.scheduler.host_pages import HostPages
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.step_time import StepTimeModel


class PreemptionChoice:
    """Decides between `pause`, `swap` and `recompute` for one victim at a time.

    Args:
      preemption: a name of the table.
      host_pages: where swapped pages go.
      step_time: knows what a prompt token and a page's copy took.
    """

    FORGETTING = 0.05
    """Share by which the price of a swap falls each time it was too high, so that it is paid again some day."""

    def __init__(self, preemption: str, host_pages: HostPages, step_time: StepTimeModel) -> None:
        self._preemption = preemption
        self._host_pages = host_pages
        self._step_time = step_time

    def mode_for(self, victim: Sequence) -> str:
        """Its mode; never `auto`."""
        if self._preemption in ("pause", "recompute"):
            return self._preemption
        has_room = 0 < victim.num_held_pages <= self._host_pages.num_free
        if not has_room or (self._preemption == "auto" and self._is_cheaper_to_recompute(victim)):
            return "recompute"
        return "swap"

    def _is_cheaper_to_recompute(self, victim: Sequence) -> bool:
        """By measured iterations; while they are too few to say, no work is thrown away."""
        recompute_s = self._step_time.prefill_s(victim.num_scheduled)
        swap_s = self._step_time.swap_s(2 * victim.num_held_pages)
        if recompute_s is None or swap_s is None or swap_s <= recompute_s:
            return False
        self._step_time.forget_swap(self.FORGETTING)
        return True
