"""PromptChoice: which prompts get a chunk in an iteration, and of how many tokens."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.step_time import StepTimeModel


class PromptChoice:
    """Divides what decode rows leave of the token budget, and of the step time, among prompts.

    Args:
      config: budget and limits.
      step_time: predicts how long an iteration takes.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._config = config
        self._step_time = step_time

    def choose(self, prompts: Iterable[Sequence], num_decode: int) -> list[tuple[Sequence, int]]:
        """Who gets a chunk and of how many tokens; as many as the budget reaches.

        Args:
          prompts: those not computed to their ends, in promotion order: first come, first served.
          num_decode: decode rows of the iteration.
        """
        config = self._config
        budget = self._budget(num_decode)
        chosen: list[tuple[Sequence, int]] = []
        num_long = 0
        for sequence in prompts:
            if budget <= 0 or len(chosen) == config.max_prefill_seqs:
                break
            left = sequence.num_prefill_tokens - sequence.num_scheduled
            if 0 < config.long_prefill_token_threshold < left:
                if num_long == config.max_long_prefills:
                    continue
                num_long += 1
            size = min(left, config.prefill_chunk, budget)
            chosen.append((sequence, size))
            budget -= size
        return chosen

    def _budget(self, num_decode: int) -> int:
        """Prompt tokens of this iteration: what decode rows leave of the budget, and of the step time."""
        budget = self._config.max_num_batched_tokens - num_decode
        if self._config.itl_target_s is None or not num_decode:
            return budget
        fitting = self._step_time.prefill_tokens_within(self._config.itl_target_s, num_decode)
        # A page's worth at least: prompts go on under any target.
        return budget if fitting is None else min(budget, max(fitting, self._config.page_size))
