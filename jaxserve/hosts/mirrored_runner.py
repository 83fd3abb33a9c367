"""MirroredRunner: the leader's `ModelRunner`, whose calls the followers repeat.

Each call that starts something on the devices is sent first and then made here, so the followers' devices have the
same programs in the same order, and none of them waits for this host's part of the call. What a step came to is
compared when it is collected; the followers' answers are not waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request
from jaxserve.hosts.leader import Followers
from jaxserve.hosts.messages import Kind, StepWriter, pieces_of, step_digest, write_arrays
from jaxserve.runtime import MemoryPlan, ModelRunner, PreparedStep, StepHandle, StepOutput
from jaxserve.runtime.programs import Progress
from jaxserve.scheduler import StepPlan
from jaxserve.tables import BucketTable

_EXPLAIN_S = 2.0


class MirroredRunner:
    """Has `ModelRunner`'s interface, but for what only measurements and tests use.

    Args:
      runner: of this process.
      followers: who have agreed on its memory plan.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._writer = StepWriter()
        self._chains: dict[int, bytes] = {}  # by iteration, of all that was run up to its sampling

    @property
    def params(self) -> Any:
        """See `ModelRunner`."""
        return self._runner.params

    @property
    def page_bytes(self) -> int:
        """See `ModelRunner`."""
        return self._runner.page_bytes

    @property
    def memory_plan(self) -> MemoryPlan:
        """See `ModelRunner`."""
        return self._runner.memory_plan

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """See `ModelRunner`."""
        return self._runner.scheduler_config

    @property
    def buckets(self) -> BucketTable:
        """See `ModelRunner`."""
        return self._runner.buckets

    @property
    def newest(self) -> jax.Array | None:
        """See `ModelRunner`."""
        return self._runner.newest

    def warm_up(self, progress: Progress | None = None) -> None:
        """See `ModelRunner`; everywhere at once, and ended everywhere when it returns."""
        self._followers.run(Kind.WARM_UP)
        self._runner.warm_up(progress)
        self._followers.reports()
        self._followers.ready = True

    def place_adapter(self, layers: Any, place: int) -> None:
        """See `ModelRunner`; followers get the arrays, not the file."""
        for piece in pieces_of(write_arrays({"place": place}, jax.tree.leaves(layers))):
            self._followers.run(Kind.ADAPTER_PART, piece)
        self._followers.run(Kind.ADAPTER)
        self._runner.place_adapter(layers, place)

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """See `ModelRunner`.

        Raises:
          ValueError: always.
        """
        raise ValueError("logits of prompts are for measurements in one process; several processes hold this model")

    def prepare(
        self,
        plan: StepPlan,
        request_of: Callable[[str], Request],
        outputs_of: Callable[[str], list[int]],
    ) -> PreparedStep:
        """See `ModelRunner`; followers get what it packs."""
        return self._runner.prepare(plan, request_of, outputs_of)

    def dispatch(self, prepared: PreparedStep) -> StepHandle:
        """See `ModelRunner`."""
        iteration, runs_through = prepared.plan.iteration, prepared.tables.limits is not None
        parts = self._writer.write(prepared)
        chain = self._followers.run(Kind.STEP, *parts, ends_step=iteration if runs_through else None)
        if runs_through:
            self._chains[iteration] = chain
        with self._explained():
            return self._runner.dispatch(prepared)

    def sample(self, handle: StepHandle, masks: np.ndarray | None = None) -> None:
        """See `ModelRunner`."""
        iteration = handle.plan.iteration
        parts = write_arrays({"iteration": iteration}, [] if masks is None else [masks])
        self._chains[iteration] = self._followers.run(Kind.SAMPLE, *parts, ends_step=iteration)
        with self._explained():
            self._runner.sample(handle, masks)

    def collect(self, handle: StepHandle) -> StepOutput:
        """See `ModelRunner`."""
        with self._explained():
            output = self._runner.collect(handle)
        plan = handle.plan
        digest = step_digest(self._chains.pop(plan.iteration), handle, len(plan.decode), len(plan.prefill))
        self._followers.compare_step(plan.iteration, digest)
        return output

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A lost follower breaks collectives, which the device tells first: the reason is worth a moment's wait."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self._followers.explain(_EXPLAIN_S)
            raise
