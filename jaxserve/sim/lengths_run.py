"""LengthsRun: requests of given output lengths through some slots, nothing else in the way.

Time is the number of iterations and prompts are one token long, which the iteration of the first output token
computes: a request of n output tokens holds its slot for n iterations, and a slot-step is an output token or
is lost. So figures that textbooks work out on paper can be read off the scheduler's own plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of


@dataclass(frozen=True, slots=True)
class LengthsRun:
    """What came of it.

    Attributes:
      output_tokens: of all requests; iterations: from the first arrival until the last ended, idle time included.
    """

    num_slots: int
    output_tokens: int
    iterations: float

    @property
    def slot_utilisation(self) -> float:
        """Slot-steps that gave an output token, over all."""
        return self.output_tokens / (self.num_slots * self.iterations)

    @property
    def tokens_per_iteration(self) -> float:
        """Output tokens, mean over the iterations."""
        return self.output_tokens / self.iterations


def slot_config(num_slots: int, longest: int, **settings: Any) -> SchedulerConfig:
    """A scheduler whose only limits are its slots and what `settings` say.

    Args:
      longest: most tokens, prompt and output, of a request.
    """
    page_size = 16
    return SchedulerConfig(
        **{
            "max_num_seqs": num_slots,
            "max_num_batched_tokens": max(num_slots, longest),
            "prefill_chunk": longest,
            "max_prefill_seqs": num_slots,
            "page_size": page_size,
            "num_pages": 1 + num_slots * -(-longest // page_size),
            "max_model_len": longest,
            "max_queue_requests": 1 << 20,
            "max_queue_tokens": 1 << 40,
            **settings,
        }
    )


def run_lengths(
    outputs: Sequence[int], num_slots: int, batching: str, instants: Sequence[float] | None = None, **settings: Any
) -> LengthsRun:
    """Runs the requests in their order.

    Args:
      outputs: tokens of each request.
      batching: as of `PolicyConfig`.
      instants: arrivals, ascending; all at 0 without.
      settings: more of the scheduler's.
    """
    config = slot_config(num_slots, max(outputs) + 1, batching=batching, **settings)
    arrivals = (
        Arrival(at, make_request(f"r{number}", prompt_of(number, 1), length), length, "")
        for number, (length, at) in enumerate(zip(outputs, instants or [0.0] * len(outputs), strict=True))
    )
    report = figures(Simulator(config, UnitCost(), TimedSource(arrivals)).run(), Objectives())
    assert report["completed"] == len(outputs), report
    return LengthsRun(num_slots, report["output_tokens"], report["duration_s"])
