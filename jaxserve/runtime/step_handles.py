"""What a step is between the host's calls: prepared, dispatched, collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxserve.runtime.page_transfers import PreparedMoves
from jaxserve.runtime.sampler import NOT_A_NUMBER
from jaxserve.runtime.slot_state import SlotRow
from jaxserve.runtime.steps import Forwarded, StepOutputs
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.tables import Bucket, StepTables


@dataclass(frozen=True, slots=True)
class RowScores:
    """Raw log-probabilities at one position.

    Attributes:
      logprob, rank: of the token itself.
      top: (token id, logprob) of the likeliest, best first; as many as the sampler keeps.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class PreparedStep:
    """A packed plan: its tables, the dense rows of requests that took a slot and edit logits, and pages it moves."""

    plan: StepPlan
    slot_rows: list[tuple[int, SlotRow]]
    tables: StepTables
    moves: PreparedMoves | None = None


@dataclass(slots=True)
class StepHandle:
    """A dispatched step.

    Attributes:
      plan, bucket: what runs, and in which compiled shape.
      forwarded: the first program's results, with the second one's parameters; None once that is started.
      outputs: the arrays to come; None until then.
    """

    plan: StepPlan
    bucket: Bucket
    forwarded: tuple[Forwarded, np.ndarray] | None
    outputs: StepOutputs | None = None


@dataclass(slots=True)
class StepOutput:
    """A collected step.

    Attributes:
      result: for the scheduler.
      bucket: the compiled shape that ran.
      broken_decode, broken_prefill: decode rows and chunks whose logits were NaN or infinite; they have no token.
    """

    result: StepResult
    bucket: Bucket
    _outputs: StepOutputs
    broken_decode: tuple[int, ...] = ()
    broken_prefill: tuple[int, ...] = ()
    _arrays: dict[str, Any] = field(default_factory=dict)

    def scores(self, source: str, row: int) -> RowScores:
        """Of the token sampled by decode row or prefill chunk `row` (see `TokenEvent`)."""
        return self._at("scores", row if source == "decode" else self.bucket.decode_rows + row)

    def prompt_scores(self, first: int, count: int) -> list[RowScores]:
        """Of the tokens that follow flat prefill positions [first, first + count)."""
        return [self._at("prompt_scores", index) for index in range(first, first + count)]

    def _at(self, name: str, index: int) -> RowScores:
        arrays = self._arrays.get(name)
        if arrays is None:
            arrays = self._arrays[name] = jax.device_get(getattr(self._outputs, name))
        top = list(zip(arrays.top_ids[index].tolist(), arrays.top_logprobs[index].tolist(), strict=True))
        return RowScores(float(arrays.logprob[index]), int(arrays.rank[index]), top)


def output_of(handle: StepHandle, sampled: np.ndarray) -> StepOutput:
    """What the host knows of a step whose tokens are there.

    Args:
      sampled: `StepOutputs.tokens` of it.
    """
    plan, bucket, outputs = handle.plan, handle.bucket, handle.outputs
    assert outputs is not None, f"plan {plan.iteration} was not sampled"
    if plan.num_steps > 1:
        tokens = sampled[:, : len(plan.decode)]
        broken = (tokens == NOT_A_NUMBER).any(axis=0).nonzero()[0]
        return StepOutput(_runs_of(tokens), bucket, outputs, tuple(broken.tolist()))
    of_rows, rows = sampled.tolist(), bucket.decode_rows
    decode, prefill = tuple(of_rows[: len(plan.decode)]), tuple(of_rows[rows : rows + len(plan.prefill)])
    return StepOutput(StepResult(decode, prefill), bucket, outputs, _broken_in(decode), _broken_in(prefill))


def _broken_in(tokens: tuple[int, ...]) -> tuple[int, ...]:
    if NOT_A_NUMBER not in tokens:
        return ()
    return tuple(row for row, token in enumerate(tokens) if token == NOT_A_NUMBER)


def _runs_of(tokens: np.ndarray) -> StepResult:
    """The result of a plan of several steps.

    Args:
      tokens: int32[max steps, rows], see `make_decode_loop`.
    """
    counts = (tokens >= 0).sum(axis=0).tolist()
    return StepResult((), (), tuple(tuple(row[:count]) for row, count in zip(tokens.T.tolist(), counts, strict=True)))
