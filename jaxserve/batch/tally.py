"""Tally: what became of the lines; and the engine's figures of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxserve.batch.records import Result


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the engine did, up to now.

    Attributes:
      output_tokens: sampled, those of unfinished requests included.
      slot_utilisation: slots with work over all slots, mean over iterations.
      budget_use: tokens computed over the token budget, mean over iterations.
      preemptions: times a request gave up its slot.
    """

    output_tokens: int = 0
    slot_utilisation: float = 0.0
    budget_use: float = 0.0
    preemptions: int = 0


@dataclass(slots=True)
class Tally:
    """Counts of lines and tokens.

    Attributes:
      num_lines: of the input, blank ones left out.
      num_earlier, num_earlier_failed: lines whose result was there before this run, and those of them with an error.
      num_answered, num_failed: results of this run, without and with an error.
      codes: how often each error code came in this run.
      prompt_tokens, cached_tokens, output_tokens: of this run's answers.
    """

    num_lines: int
    num_earlier: int = 0
    num_earlier_failed: int = 0
    num_answered: int = 0
    num_failed: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def num_new(self) -> int:
        """Results of this run."""
        return self.num_answered + self.num_failed

    @property
    def num_done(self) -> int:
        """Lines with a result."""
        return self.num_earlier + self.num_new

    @property
    def num_left(self) -> int:
        """Lines without one."""
        return self.num_lines - self.num_done

    def add(self, result: Result) -> None:
        """Counts a result that has been written."""
        if result.error is not None:
            self.num_failed += 1
            self.codes[result.error.code] += 1
            return
        self.num_answered += 1
        usage = result.response["body"]["usage"] if result.response else {}
        self.prompt_tokens += usage["prompt_tokens"]
        self.output_tokens += usage["completion_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
