"""PromptChoice: which prompts get a chunk in an iteration, and of how many tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.step_time import StepTimeModel


class PromptChoice:
    """Divides what decode rows leave of the token budget, and of the step time, among prompts.

    Args:
      config: budget and limits.
      step_time: predicts how long an iteration takes.
      num_slots_held: requests with a slot of each service class that has an ITL target; counted by the caller,
        who keeps it up to date.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel, num_slots_held: Mapping[str, int]) -> None:
        self._config = config
        self._step_time = step_time
        self._num_slots_held = num_slots_held
        targets = [(c.itl_target_s, c.name) for c in config.service_classes if c.itl_target_s is not None]
        self._class_targets = sorted(targets)

    def choose(self, prompts: Collection[Sequence], num_decode: int, budget: int) -> list[tuple[Sequence, int]]:
        """Who gets a chunk and of how many tokens; as many as the budget reaches.

        Args:
          prompts: those with a slot that are not computed to their ends, in promotion order: first come, first
            served.
          num_decode: decode rows of the iteration.
          budget: its tokens, prompts and decode rows together.
        """
        config = self._config
        budget -= num_decode
        target_s = self.target_s(prompts) if num_decode else None
        left_s = None if target_s is None else self._step_time.left_s(target_s, num_decode)
        owed = config.page_size  # under any target a page's worth at least goes on
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
            if left_s is not None:
                fitting, seconds = self._step_time.chunk_within(left_s, sequence.num_scheduled, size)
                size = max(fitting, min(size, owed))
                if not size:
                    break
                left_s -= seconds
                owed = max(owed - size, 0)
            chosen.append((sequence, size))
            budget -= size
        return chosen

    def target_s(self, prompts: Collection[Sequence]) -> float | None:
        """Seconds an iteration should take at most: the engine's target, or a smaller one of a class that decodes.

        Args:
          prompts: of those with a slot, the ones that do not decode.
        """
        target_s = self._config.itl_target_s
        if not self._class_targets:
            return target_s
        # Who holds a slot and has no prompt left to compute decodes: prompts are few, slots may be many.
        prefilling = Counter(sequence.request.service_class for sequence in prompts)
        for class_target_s, name in self._class_targets:
            if self._num_slots_held[name] > prefilling[name]:
                return class_target_s if target_s is None else min(target_s, class_target_s)
        return target_s
