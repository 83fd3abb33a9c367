"""StepRecovery: an engine goes on after a step that failed.

The steps in flight are dropped on the device and in the scheduler, whose requests stand in the queue again; tokens
that were delivered stay. `recovery` decides what comes of it: a smaller token budget where the device had no memory,
requests held back until the one that makes steps fail is found, that one's end, or the end of the engine.

A request whose logits are broken needs none of it: its row says so, and it ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from absl import logging

from jaxserve.core import FinishReason, HostLostError, MissingBucketError, RequestFailedError
from jaxserve.engine.delivery import Delivery
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.recovery import CLEARING, Suspicion, TokenBudget, Verdict
from jaxserve.runtime import ModelRunner, StepOutput, is_out_of_memory
from jaxserve.scheduler import Flight, Scheduler, Sequence

_NOT_RETRIED = (HostLostError, MissingBucketError)


class StepFailedError(Exception):
    """A call of the runner failed; `error` says why.

    Args:
      where: "dispatch", "sample" or "collect".
    """

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(f"{where} failed: {type(error).__name__}: {error}")
        self.where = where
        self.error = error


class StepRecovery:
    """Called by the thread that steps the engine.

    Args:
      scheduler, runner, delivery, metrics: of the engine.
      lock: of the engine.
      clock: the engine's.
      alone: this process is the whole engine; where others have their part in every step, none is tried again.

    Attributes:
      alone: likewise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        delivery: Delivery,
        metrics: EngineMetrics,
        *,
        lock: EngineLock,
        clock: Callable[[], float],
        alone: bool,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._delivery = delivery
        self._metrics = metrics
        self._lock = lock
        self._clock = clock
        self.alone = alone
        self._suspicion = Suspicion(scheduler.config.max_num_seqs)
        self._budget = TokenBudget(scheduler.config.max_num_batched_tokens)
        # By number: the suspect, and its output tokens when its step failed.
        self._known: dict[int, tuple[Sequence, int]] = {}
        metrics.set_token_budget(self._budget.tokens)

    def recover(self, failure: StepFailedError) -> None:
        """Drops what is in flight and makes ready to go on; the caller has forgotten the steps.

        Raises:
          Exception: the error of the step, if it is not to be tried again; or of the recovery, from the step's.
        """
        error = failure.error
        if isinstance(error, _NOT_RETRIED):
            raise error
        if not self.alone:
            logging.error(
                "the %s of a step failed; an engine of several processes does not go on from that: all of them end, and"
                " must be started again",
                failure.where,
            )
            raise error
        no_memory = is_out_of_memory(error)
        self._metrics.step_failed("out_of_memory" if no_memory else "error")
        logging.error("the %s of a step failed; its requests are computed again", failure.where, exc_info=error)
        try:
            keeps_pool = self._runner.recover()
        except Exception as second:
            with self._lock:
                self._scheduler.recover(self._clock(), keeps_cache=False)
            raise second from error
        with self._lock:
            now = self._clock()
            self._look(now)
            flights = self._scheduler.recover(now, keeps_cache=keeps_pool)
            self._end_exporters(flights, now)
            self._judge(flights, error, no_memory, now)
        self._metrics.step_recovered()

    def drop(self) -> None:
        """Takes back the plans in flight, none of which is on the device; no request is suspected.

        Raises:
          Exception: the device cannot go on.
        """
        keeps_pool = self._runner.recover()
        with self._lock:
            now = self._clock()
            self._end_exporters(self._scheduler.recover(now, keeps_cache=keeps_pool), now)

    def before_plan(self, now: float) -> None:
        """A plan is about to be made; under the lock."""
        if self._known:
            self._look(now)

    def took_in(self, now: float) -> None:
        """A step came back; under the lock."""
        if self._budget.good():
            self._limit_budget(now)

    def end_broken(self, output: StepOutput) -> None:
        """Ends the requests of the oldest step in flight whose logits are broken; before its tokens are taken in."""
        with self._lock:
            now, flight = self._clock(), self._scheduler.oldest_flight
            broken = [flight.decode[row] for row in output.broken_decode]
            broken += [flight.prefill[row] for row in output.broken_prefill]
            for sequence in broken:
                if sequence.finish_reason is not None:
                    continue
                count = len(sequence.output_token_ids)
                what = f"the model's logits are not a number after {count} output tokens; the request cannot go on"
                self._metrics.nan_logits()
                self._delivery.fail(sequence.request_id, RequestFailedError(what), now, forgets=True)

    def _judge(self, flights: list[Flight], error: Exception, no_memory: bool, now: float) -> None:
        if no_memory and self._budget.out_of_memory(max((each.plan.num_tokens for each in flights), default=0)):
            self._limit_budget(now)
            return
        rows = dict.fromkeys(each for flight in flights for each in (*flight.decode, *flight.prefill))
        participants = [each for each in rows if each.finish_reason is None]
        for sequence in participants:
            self._known[sequence.arrival] = sequence, len(sequence.output_token_ids)
        verdict = self._suspicion.failed([each.arrival for each in participants])
        if verdict.hopeless:
            self._suspicion, self._known = Suspicion(self._scheduler.config.max_num_seqs), {}
            logging.error("steps fail whoever takes part in them: the engine cannot go on")
            raise error
        if verdict.culprit is not None:
            self._end_culprit(self._known[verdict.culprit][0], error, now)
        self._follow(verdict, now)

    def _end_culprit(self, sequence: Sequence, error: Exception, now: float) -> None:
        what = f"the model's step failed ({type(error).__name__}) whenever this request had part in it; others go on"
        self._metrics.failed_by_step()
        self._delivery.fail(sequence.request_id, RequestFailedError(what), now, forgets=True)

    def _end_exporters(self, flights: Iterable[Flight], now: float) -> None:
        """Pages that were on their way to another engine do not arrive: it computes them itself."""
        for request_id in dict.fromkeys(move.request_id for flight in flights for move in flight.plan.exports):
            in_rows = [each for flight in flights for each in flight.prefill if each.request_id == request_id]
            if in_rows and in_rows[0].finish_reason is None:
                what = "a step failed while the pages of this request were copied out"
                self._delivery.fail(request_id, RequestFailedError(what), now)

    def _look(self, now: float) -> None:
        """Clears suspects that have come on, and forgets those that ended."""
        for number in list(self._suspicion.suspects):
            sequence, num_before = self._known[number]
            if sequence.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._follow(self._suspicion.gone([number]), now)
            elif sequence.finish_reason or len(sequence.output_token_ids) - num_before >= CLEARING:
                self._follow(self._suspicion.cleared(number), now)
        kept = self._suspicion.held.union(self._suspicion.suspects)
        if len(kept) < len(self._known):
            self._known = {number: known for number, known in self._known.items() if number in kept}

    def _follow(self, verdict: Verdict, now: float) -> None:
        for numbers, change in ((verdict.hold, self._scheduler.hold), (verdict.release, self._scheduler.release)):
            for number in numbers:
                sequence, _ = self._known[number]
                if sequence.finish_reason is None:
                    change(sequence.request_id, now)

    def _limit_budget(self, now: float) -> None:
        tokens = self._budget.tokens
        logging.warning("steps have at most %d tokens from now on", tokens)
        self._scheduler.limit_budget(tokens, now)
        self._metrics.set_token_budget(tokens)
