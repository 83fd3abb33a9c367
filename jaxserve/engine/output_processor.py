"""Per-request output state: token events become text deltas, stop strings and log-probabilities."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from absl import logging

from jaxserve.core import FinishReason, Logprob, Request, RequestFailedError, RequestMetrics, UnfollowableError
from jaxserve.engine.grammar_state import GrammarState
from jaxserve.runtime import RowScores, StepOutput
from jaxserve.scheduler.plan import PrefillChunk, TokenEvent
from jaxserve.text import IncrementalDetokenizer, StopChecker, Tokenizer


@dataclass(slots=True)
class OutputDelta:
    """What one iteration added to one choice.

    Attributes:
      index: choice number.
      text: new text; may be empty while characters or a possible stop string are held back.
      token_ids: new tokens.
      logprobs: one dict per new token, when asked.
      finish_reason: set on the last delta.
      stop_reason: the stop string or stop id that ended it; None for EOS.
      prompt_logprobs: on choice 0's first delta, when asked; entry 0 is None.
      metrics: instants of the request, on the last delta.
      num_cached_tokens: prompt tokens found in the prefix cache, on the last delta.
      error: why, where `finish_reason` is "unfollowable", or "error" and the cause is known.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def merge(self, later: OutputDelta) -> None:
        """Appends `later`, which follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.metrics = later.metrics
        self.num_cached_tokens = later.num_cached_tokens
        self.error = later.error
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


class RequestState:
    """One live request's output side.

    Args:
      request: what runs.
      index: its choice number.
      tokenizer: for text; None leaves texts empty.
      sink: receives each delta.
      now: arrival, engine clock.
      grammar: its place in the grammar that binds it.

    Attributes:
      plain: a token after the first that does not end the request adds its text and nothing else.
    """

    __slots__ = (
        *("request", "index", "metrics", "last_token_at", "num_output_tokens", "num_cached_tokens", "plain", "cause"),
        *("_grammar", "_sink", "_tokenizer", "_detokenizer", "_stops", "_prompt_logprobs"),
    )

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        sink: Callable[[OutputDelta], None],
        now: float,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request = request
        self._grammar = grammar
        self.index = index
        self.metrics = RequestMetrics(arrived_at=now)
        self.last_token_at: float | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.cause = ""  # see `RequestRecord`
        self._sink = sink
        self._tokenizer = tokenizer
        params = request.params
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                list(request.prompt_token_ids),
                skip_special_tokens=params.skip_special_tokens,
                shown_special_ids=params.shown_special_ids,
            )
            if tokenizer
            else None
        )
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.plain = grammar is None and params.logprobs is None and not params.stop
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None and index == 0 else None
        )

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether scores of prompt tokens are still to be delivered."""
        return self._prompt_logprobs is not None

    def take_prompt_scores(self, chunk: PrefillChunk, first: int, output: StepOutput) -> None:
        """Keeps the scores of a chunk whose tokens begin at flat prefill position `first`.

        Raises:
          RequestFailedError: they are not numbers.
        """
        if self._prompt_logprobs is None:
            return
        # A recomputed chunk scores what is known already; positions past the prompt have no target.
        known = len(self._prompt_logprobs) - 1
        skip = max(0, known - chunk.start)
        last = min(chunk.start + len(chunk.token_ids), self.request.num_prompt_tokens - 1)
        count = last - chunk.start - skip
        if count <= 0:
            return
        k = self.request.params.prompt_logprobs or 0
        targets = self.request.prompt_token_ids[chunk.start + skip + 1 :]
        scores = output.prompt_scores(first + skip, count)
        self._prompt_logprobs += [self._entry(t, s, k) for t, s in zip(targets, scores, strict=False)]

    def take_plain(self, token_id: int, now: float) -> None:
        """`take` of a token after the first of a `plain` request, which goes on."""
        self.num_output_tokens += 1
        self.last_token_at = now
        detokenizer = self._detokenizer
        self._sink(OutputDelta(self.index, "" if detokenizer is None else detokenizer.add(token_id), [token_id]))

    def take(
        self,
        token_id: int | None,
        source: str,
        row: int,
        end: TokenEvent | None,
        output: StepOutput | None,
        now: float,
        later: Sequence[int] = (),
    ) -> bool:
        """Delivers a token, an end, or both.

        Args:
          token_id, source, row: see `TokenEvent`.
          end: the event when it ends the request.
          later: tokens that came with the first and follow it, of a free-running request; an end is of the last.

        Returns:
          Whether a stop string or the grammar ended the request, which the scheduler does not know yet.

        Raises:
          RequestFailedError: the grammar or the barred words cannot be followed any further.
        """
        delta = OutputDelta(self.index, finish_reason=str(end.finish_reason) if end else None)
        grammar = self._grammar if token_id is not None else None
        if grammar is not None:
            grammar.check()
            if grammar.dropped:
                token_id = None
        stopped = None
        if token_id is not None:
            scores = None
            if output is not None and self.request.params.logprobs is not None:
                scores = output.scores(source, row)
            stop_token_id = end and end.stop_token_id
            stopped = self._take_token(token_id, scores, None if later else stop_token_id, delta, now)
            for index, other in enumerate(later, 1):
                self._take_token(other, None, stop_token_id if index == len(later) else None, delta, now)
        if grammar is not None and grammar.ended:
            delta.finish_reason = FinishReason.STOP.value
        if self._prompt_logprobs is not None and (token_id is not None or delta.finish_reason):
            delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if delta.finish_reason is not None:
            if self.request.params.logprobs is not None and delta.logprobs is None:
                delta.logprobs = []  # of an output without tokens too
            if stopped is None:
                delta.text += self._rest(delta)
            self.metrics.finished_at = now
            delta.metrics = self.metrics
            delta.num_cached_tokens = self.num_cached_tokens
        self._sink(delta)
        return stopped is not None or (grammar is not None and grammar.ended)

    def fail(self, error: Exception, now: float) -> FinishReason:
        """Delivers an end that is no completion, in the handler of what made it; returns the reason."""
        reason = FinishReason.UNFOLLOWABLE if isinstance(error, UnfollowableError) else FinishReason.ERROR
        cause = str(error) if isinstance(error, RequestFailedError) else None
        if reason is FinishReason.ERROR:
            what = cause or "an unexpected error"
            logging.error("request %s failed: %s", self.request.request_id, what, exc_info=cause is None)
        self.metrics.finished_at = now
        with contextlib.suppress(Exception):  # the sink itself may be what failed
            self._sink(OutputDelta(self.index, finish_reason=reason.value, metrics=self.metrics, error=cause))
        return reason

    def _take_token(
        self, token_id: int, scores: RowScores | None, stop_token_id: int | None, delta: OutputDelta, now: float
    ) -> str | None:
        params = self.request.params
        self.num_output_tokens += 1
        delta.token_ids.append(token_id)
        if self.metrics.first_token_at is None:
            self.metrics.first_token_at = now
        self.last_token_at = now
        if params.logprobs is not None and scores is not None:
            delta.logprobs = [self._entry(token_id, scores, params.logprobs)]
        if stop_token_id is not None and stop_token_id not in self.request.eos_token_ids:
            delta.stop_reason = stop_token_id
        if self._detokenizer is None:
            return None
        hidden = stop_token_id is not None and not params.include_stop_str_in_output
        text = "" if hidden else self._detokenizer.add(token_id)
        # Of the first min_tokens tokens no text counts, as EOS may not be among them either.
        if self._stops is None or self.num_output_tokens <= params.min_tokens:
            delta.text += text
            return None
        text, stopped = self._stops.feed(text)
        delta.text += text
        if stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped
        return stopped

    def _rest(self, delta: OutputDelta) -> str:
        """Held-back text at the end; it may still complete a stop string."""
        if self._detokenizer is None:
            return ""
        rest = self._detokenizer.flush()
        if self._stops is None or self.num_output_tokens <= self.request.params.min_tokens:
            return rest
        text, stopped = self._stops.feed(rest)
        if stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped
            return text
        return text + self._stops.flush()

    def _entry(self, token_id: int, scores: RowScores, count: int) -> dict[int, Logprob]:
        """The token first, then the `count` likeliest, best first.

        Raises:
          RequestFailedError: the logits were broken where nobody samples: of a prompt, or of tokens that are barred.
        """
        if math.isnan(scores.logprob):
            raise RequestFailedError("the model's logits are not a number; the request cannot go on")
        entry = {token_id: Logprob(scores.logprob, scores.rank, self._text(token_id))}
        for rank, (other, logprob) in enumerate(scores.top[:count], start=1):
            if other != token_id:
                entry[other] = Logprob(logprob, rank, self._text(other))
        return entry

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._tokenizer else None
