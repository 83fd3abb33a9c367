"""Delivery: the live requests' output sides, and what the scheduler's events mean for them.

Everything here is called under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from jaxserve.core import FinishReason, Request
from jaxserve.engine.grammar_state import GrammarStates
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.monitor import EngineMonitor
from jaxserve.engine.output_processor import OutputDelta, RequestState
from jaxserve.runtime import StepOutput
from jaxserve.scheduler import Scheduler, TokenEvent, TokenEvents
from jaxserve.text import Tokenizer

Sink = Callable[[OutputDelta], None]


class Delivery:
    """Turns events into deltas, and tells metrics and monitor of ends.

    Args:
      scheduler, metrics, monitor, grammars: of the engine.
      tokenizer: for text; None leaves texts empty.

    Attributes:
      states: of the live requests, by id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        monitor: EngineMonitor,
        grammars: GrammarStates,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._monitor = monitor
        self._grammars = grammars
        self._tokenizer = tokenizer
        self.states: dict[str, RequestState] = {}

    def open(self, request: Request, index: int, sink: Sink, now: float) -> None:
        """A request is live from now on, as choice `index` of its prompt."""
        grammar = self._grammars.add(request)
        self.states[request.request_id] = RequestState(request, index, self._tokenizer, sink, now, grammar)

    def take_early_ends(self, now: float) -> None:
        """Delivers the ends that the scheduler decided outside an update."""
        self._take_each(self._scheduler.take_events(), None, now)

    def take_step(self, events: TokenEvents, output: StepOutput, now: float) -> None:
        """Delivers what an update brought; decode rows by column, as most have a token and nothing else."""
        self._metrics.sampled(events.num_tokens)
        ends, later = events.ends, events.later or repeat(())
        for request_id, token_id, row, others in zip(
            events.request_ids, events.token_ids, events.rows, later, strict=False
        ):
            self._take(request_id, token_id, "decode", row, ends.get(row), output, now, others)
        self._take_each(events.prefill, output, now)
        # Stop strings found just now ended their requests: nothing is left to say about those.
        self._scheduler.take_events()

    def _take_each(self, events: Sequence[TokenEvent], output: StepOutput | None, now: float) -> None:
        for event in events:
            end = None if event.finish_reason is None else event
            self._take(event.request_id, event.token_id, event.source, event.row, end, output, now)

    def _take(
        self,
        request_id: str,
        token_id: int | None,
        source: str,
        row: int,
        end: TokenEvent | None,
        output: StepOutput | None,
        now: float,
        later: Sequence[int] = (),
    ) -> None:
        """A token, an end or both, of a request that is live unless a stop string ended it; see `RequestState.take`."""
        state = self.states.get(request_id)
        if state is None:
            return
        if token_id is not None:
            self._metrics.token(state, now, len(later))
        try:
            stopped = state.take(token_id, source, row, end, output, now, later)
        except Exception as error:
            # A fault in one request's text handling ends that request; its neighbours go on.
            self._end(state, end, state.fail(error, now), now)
            return
        if stopped:
            self._end(state, end, FinishReason.STOP, now)
        elif end is not None and end.finish_reason is not None:
            self._end(state, end, end.finish_reason, now)

    def _end(self, state: RequestState, end: TokenEvent | None, reason: str, now: float) -> None:
        """Forgets a request, telling the scheduler where it does not know of the end."""
        request_id = state.request.request_id
        if end is None:
            self._scheduler.abort(request_id, now, reason)
        del self.states[request_id]
        self._grammars.drop(request_id)
        if reason == FinishReason.DISPLACED:
            self._metrics.rejected(reason)
        else:
            self._metrics.finished(state, reason)
        self._monitor.ended(state, reason, now)
