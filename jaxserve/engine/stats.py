"""EngineStats: sums over iterations."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduler import StepPlan, StepResult
from jaxserve.tables import Bucket


@dataclass(slots=True)
class EngineStats:
    """Sums over dispatched iterations, for reports.

    Attributes:
      iterations: dispatched plans.
      steps: that ran in them: one in each, or several decode steps.
      slot_steps: slots with work for live requests, summed over steps; wasted_rows: those with work for
        requests that had ended by the time the step came back.
      tokens: real tokens computed, of which `prefill_tokens` are of prompts; padded_tokens: rows of the buckets they
        ran in.
      output_tokens: sampled for live requests.
      cache_queries, cache_hits: prompt tokens looked up in the prefix cache, and found.
      host_s: seconds of scheduling, tables and output handling, of which at least `hidden_s` while the device was
        busy; device_s: of waiting for the device.
    """

    iterations: int = 0
    steps: int = 0
    slot_steps: int = 0
    wasted_rows: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0
    output_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    host_s: float = 0.0
    hidden_s: float = 0.0
    device_s: float = 0.0

    def count(self, plan: StepPlan, result: StepResult, bucket: Bucket, num_sampled: int, num_wasted: int) -> None:
        """Adds an iteration.

        Args:
          result: what came of it.
          bucket: that it ran in.
          num_sampled: tokens for live requests.
          num_wasted: rows of requests that had ended.
        """
        num_prefill, num_decode, num_steps = plan.num_prefill_tokens, result.num_decode_tokens, result.num_steps
        self.iterations += 1
        self.steps += num_steps
        self.slot_steps += num_decode + len(plan.prefill) - num_wasted
        self.wasted_rows += num_wasted
        self.tokens += num_prefill + num_decode
        self.prefill_tokens += num_prefill
        self.padded_tokens += bucket.decode_rows * num_steps + bucket.prefill_tokens
        self.output_tokens += num_sampled

    def slot_utilisation(self, slots: int) -> float:
        """Slots with work for live requests over all `slots`, mean over steps; in [0, 1]."""
        return self.slot_steps / max(self.steps * slots, 1)

    @property
    def steps_per_iteration(self) -> float:
        """Mean number of steps of a dispatched plan; 1 where none has several."""
        return self.steps / max(self.iterations, 1)

    @property
    def hidden_share(self) -> float:
        """Share of the host's work during which the device was busy, at least; in [0, 1]."""
        return self.hidden_s / max(self.host_s, 1e-12)

    def budget_use(self, budget: int) -> float:
        """Tokens computed over a token budget of `budget` a step; in [0, 1]."""
        return self.tokens / max(self.steps * budget, 1)
