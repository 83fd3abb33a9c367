"""Delivery: the live requests' output sides, and what the scheduler's events mean for them.

Everything here is called under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.core import FinishReason, Request, RequestFailedError
from jaxserve.engine.grammar_state import GrammarStates
from jaxserve.engine.kv_moves import forget_kv
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

    def fail(self, request_id: str, error: RequestFailedError, now: float, *, forgets: bool = False) -> None:
        """Ends a live request by an error; `forgets`: nobody is to find its pages in the prefix cache."""
        state = self.states[request_id]
        self._end(state, None, state.fail(error, now), now, forgets=forgets)
        self._scheduler.take_events()  # there is nothing more to say

    def abort(self, state: RequestState, reason: str, now: float, cause: str = "") -> bool:
        """Ends a request; False when it is not live any more, whoever has its id. `cause`: see `RequestRecord`."""
        request_id = state.request.request_id
        if self.states.get(request_id) is not state:
            return False
        state.cause = cause
        self._scheduler.abort(request_id, now, reason)
        self.take_early_ends(now)
        return True

    def take_early_ends(self, now: float) -> None:
        """Delivers the ends that the scheduler decided outside an update."""
        if events := self._scheduler.take_events():
            self._take_each(events, None, now)

    def take_step(self, events: TokenEvents, output: StepOutput, now: float) -> None:
        """Delivers what an update brought; decode rows by column, as most have a token and nothing else."""
        self._metrics.sampled(events.num_tokens)
        if events.later:
            ends = events.ends
            rows = zip(events.request_ids, events.token_ids, events.rows, events.later, strict=True)
            for request_id, token_id, row, others in rows:
                self._take(request_id, token_id, "decode", row, ends.get(row), output, now, others)
        else:
            self._take_rows(events, output, now)
        self._take_each(events.prefill, output, now)
        # Stop strings found just now ended their requests: nothing is left to say about those.
        self._scheduler.take_events()

    def _take_rows(self, events: TokenEvents, output: StepOutput, now: float) -> None:
        """`_take` of each decode row, with a token each; what most rows need is done here, without calls between."""
        states, ends = self.states, events.ends
        earlier, num_earlier = now, 0  # of the rows just taken, the instant of the token before, which most rows share
        for request_id, token_id, row in zip(events.request_ids, events.token_ids, events.rows, strict=True):
            state = states.get(request_id)
            if state is None:
                continue
            since = state.last_token_at
            if since is None or not state.plain or row in ends:
                self._take(request_id, token_id, "decode", row, ends.get(row), output, now)
                continue
            if since is not earlier:
                if num_earlier:
                    self._metrics.gaps(now - earlier, num_earlier)
                earlier, num_earlier = since, 0
            num_earlier += 1
            try:
                state.take_plain(token_id, now)
            except Exception as error:
                self._end(state, None, state.fail(error, now), now)
        if num_earlier:
            self._metrics.gaps(now - earlier, num_earlier)

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
            if state.last_token_at is None:
                self._metrics.first_token(state, now)
            else:
                self._metrics.gaps(now - state.last_token_at)
            if later:
                self._metrics.gaps(0.0, len(later))
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

    def _end(
        self, state: RequestState, end: TokenEvent | None, reason: str, now: float, *, forgets: bool = False
    ) -> None:
        """Forgets a request, telling the scheduler where it does not know of the end."""
        request_id = state.request.request_id
        if end is None:
            self._scheduler.abort(request_id, now, reason, forgets=forgets)
        del self.states[request_id]
        self._grammars.drop(request_id)
        forget_kv(state.request)
        if reason == FinishReason.DISPLACED:
            self._metrics.displaced(reason)
        else:
            self._metrics.finished(state, reason)
        self._monitor.ended(state, reason, now)
