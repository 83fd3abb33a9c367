"""StepChoice: how many decode steps an iteration may have, for the sake of a request that is still to come."""

from __future__ import annotations

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.step_time import StepTimeModel


class StepChoice:
    """Turns what an arrival may lose into a number of steps.

    A request that arrives just after a dispatch waits for every step dispatched before: all plans in flight and the
    newest. With one step each it would wait for `max_steps_ahead + 1` steps; what it loses are those beyond. Each
    plan may have an equal share of them.

    Args:
      config: limits.
      step_time: how long a step takes.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._max_steps = config.max_decode_steps
        self._share_s = config.max_arrival_delay_s / (1 + config.max_steps_ahead)
        self._step_time = step_time

    @property
    def may_run_several(self) -> bool:
        """Whether any plan has several steps under these settings."""
        return self._max_steps > 1

    def most(self, num_rows: int, target_s: float | None) -> int:
        """Decode steps at most, of so many rows; 1 while too little was measured to say how long they take.

        Args:
          target_s: that the iteration should take at most.
        """
        step_s = self._step_time.decode_s(num_rows)
        if step_s is None:
            return 1
        most = 1 + int(min(self._share_s / step_s, self._max_steps - 1))
        return most if target_s is None else max(int(min(target_s / step_s, most)), 1)
