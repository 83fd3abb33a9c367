"""Cost models: how long an iteration takes, from what its plan makes the device do.

A model sees eight numbers of a plan and nothing else, so the same model serves every scheduler setting
and can be fitted to the trace of a real engine (`tools/fit_cost_model`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Protocol

from jaxserve.scheduler import StepPlan
from jaxserve.sim.json_fields import REQUIRED, JsonFields, read_json

Windows = tuple[int, ...]
"""Of each group of layers the tokens that a query sees, as `SchedulerConfig.windows`; 0: all."""
ONE_GROUP: Windows = (0,)


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The work of one iteration; counts of tokens, but for the pages.

    Attributes:
      decode_rows: rows with one token each.
      decode_context: K/V tokens the decode rows read, their own included; here and below those in the sliding window,
        and of several groups of layers the mean, rounded down.
      prefill_tokens: prompt tokens computed.
      prefill_attention: sum over prefill tokens of the tokens each attends to, itself included.
      prefill_context: K/V tokens the chunks read, each chunk's once: its end position.
      emitted: positions that sample a token.
      swapped_pages: copied to the host or back, imported ones included.
      dispatches: 1; 0 of the second and later of several decode steps, which the host has no part in.
    """

    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_attention: int = 0
    prefill_context: int = 0
    emitted: int = 0
    swapped_pages: int = 0
    dispatches: int = 1


def plan_s(
    cost_model: CostModel, plan: StepPlan, decode_tokens: tuple[int, ...], windows: Windows = ONE_GROUP
) -> tuple[float, int]:
    """Seconds of a plan, and its steps that run.

    Args:
      decode_tokens: that each row of a plan of several steps brings; the last row to end ends it.
      windows: of the scheduler's settings.
    """
    if plan.num_steps == 1:
        return cost_model.step_s(features_of(plan, windows)), 1
    num_steps = max(*decode_tokens, 1)
    steps = (_decode_step(plan, decode_tokens, step, windows) for step in range(num_steps))
    return sum(map(cost_model.step_s, steps)), num_steps


def _decode_step(plan: StepPlan, decode_tokens: tuple[int, ...], step: int, windows: Windows) -> StepFeatures:
    """What one of several decode steps makes the device do; one that no row has a part in is the first."""
    pairs = zip(plan.decode.positions, decode_tokens, strict=True)
    positions = [position + step for position, count in pairs if count > step] or [0]
    rows = len(positions)
    context = mean_seen(positions, [1] * rows, windows)
    return StepFeatures(decode_rows=rows, decode_context=context, emitted=rows, dispatches=int(step == 0))


def mean_seen(firsts: Iterable[int], counts: Iterable[int], windows: Windows) -> int:
    """`tokens_seen` of several runs of tokens together, the mean over groups of layers."""
    runs = list(zip(firsts, counts, strict=True))
    return sum([tokens_seen(first, count, window) for window in windows for first, count in runs]) // len(windows)


def tokens_seen(first: int, count: int, sliding_window: int) -> int:
    """Tokens that each of `count` tokens from position `first` on attends to, itself included, added up; 0: all."""
    seen = first * count + count * (count + 1) // 2
    if sliding_window:
        before, after = max(first - sliding_window, 0), max(first + count - sliding_window, 0)
        seen -= after * (after + 1) // 2 - before * (before + 1) // 2
    return seen


def features_of(plan: StepPlan, windows: Windows = ONE_GROUP) -> StepFeatures:
    """What a plan makes the device do in its first step."""
    tokens = context = emitted = 0
    for chunk in plan.prefill:
        count = len(chunk.token_ids)
        tokens += count
        context += sum([min(chunk.end, window - 1 + count) if window else chunk.end for window in windows])
        emitted += chunk.emits
    starts, counts = [chunk.start for chunk in plan.prefill], [len(chunk.token_ids) for chunk in plan.prefill]
    rows = len(plan.decode)
    decode_context = 0
    for window in windows:
        if window:
            decode_context += sum([min(position + 1, window) for position in plan.decode.positions])
        else:
            decode_context += sum(plan.decode.positions) + rows
    return StepFeatures(
        decode_rows=rows,
        decode_context=decode_context // len(windows),
        prefill_tokens=tokens,
        prefill_attention=mean_seen(starts, counts, windows),
        prefill_context=context // len(windows),
        emitted=rows + emitted,
        swapped_pages=plan.num_copied_pages,
    )


class CostModel(Protocol):
    """Seconds of an iteration's step; of several decode steps, of each."""

    def step_s(self, features: StepFeatures) -> float:
        """Above 0."""

    def explain(self, features: StepFeatures) -> list[str]:
        """The arithmetic behind `step_s`, as lines to read."""


class UnitCost:
    """Every step takes 1 s: time is the number of steps."""

    def step_s(self, features: StepFeatures) -> float:
        """1.0."""
        return 1.0

    def explain(self, features: StepFeatures) -> list[str]:
        """One line."""
        return ["unit: every step takes 1 s"]


@dataclass(frozen=True, slots=True)
class LinearCost:
    """constant + coefficients x features, seconds.

    Attributes:
      constant_s: of any step.
      decode_row_s: per decode row.
      kv_token_s: per K/V token that decode rows read.
      prefill_token_s: per prompt token.
      prefill_attention_s: per token attended to by a prompt token.
      swapped_page_s: per page copied to the host or back.
      dispatch_s: of any iteration, however many decode steps it has: what the host takes.
    """

    constant_s: float
    decode_row_s: float
    kv_token_s: float
    prefill_token_s: float
    prefill_attention_s: float
    swapped_page_s: float = 0.0
    dispatch_s: float = 0.0

    @classmethod
    def from_file(cls, path: str | Path) -> LinearCost:
        """Coefficients from a JSON object with the attributes' names.

        `swapped_page_s` and `dispatch_s` may be missing; `fit`, if there, is not read.

        Raises:
          ValueError: naming the field and the rule.
        """
        document = JsonFields(read_json(path), str(path))
        document.any("fit", None)
        values = {
            field.name: document.number(field.name, REQUIRED if field.default is MISSING else field.default, low=0.0)
            for field in fields(cls)
        }
        document.close()
        if values["constant_s"] == 0.0 and (values["decode_row_s"] == 0.0 or values["prefill_token_s"] == 0.0):
            raise ValueError(
                f"{document.name_of('constant_s')} is 0; it must be above 0, unless decode_row_s and prefill_token_s"
                " are: an iteration takes time"
            )
        return cls(**values)

    def step_s(self, features: StepFeatures) -> float:
        """The sum of `terms`."""
        return (
            self.constant_s
            + self.decode_row_s * features.decode_rows
            + self.kv_token_s * features.decode_context
            + self.prefill_token_s * features.prefill_tokens
            + self.prefill_attention_s * features.prefill_attention
            + self.swapped_page_s * features.swapped_pages
            + self.dispatch_s * features.dispatches
        )

    def explain(self, features: StepFeatures) -> list[str]:
        """A line per term."""
        terms = (
            ("constant", self.constant_s, 1),
            ("decode rows", self.decode_row_s, features.decode_rows),
            ("K/V tokens read", self.kv_token_s, features.decode_context),
            ("prefill tokens", self.prefill_token_s, features.prefill_tokens),
            ("prefill attention", self.prefill_attention_s, features.prefill_attention),
            ("swapped pages", self.swapped_page_s, features.swapped_pages),
            ("dispatches", self.dispatch_s, features.dispatches),
        )
        lines = [f"{name}: {factor:.3e} s x {count} = {factor * count:.3e} s" for name, factor, count in terms]
        return [*lines, f"sum: {self.step_s(features):.3e} s"]
