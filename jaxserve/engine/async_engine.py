"""AsyncEngine: an Engine in a thread of its own, for asyncio servers.

`submit` decides at once, in the caller's thread: a full queue is answered in microseconds, however long the running
step takes. Of a stuck or dead engine every open stream fails, and every later submit; `engine_thread` has when that is.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial

import jax

from jaxserve.core import (
    NO_TERMS,
    CutShortError,
    EngineDeadError,
    EngineStuckError,
    EngineTotals,
    EngineView,
    FinishReason,
    Recording,
    RejectedError,
    Rejection,
    Request,
    RequestFailedError,
    SamplingParams,
    StructuredOutputs,
    Submission,
    Terms,
    UnfollowableError,
)
from jaxserve.engine.engine import Sink
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.lifecycle import DEAD, DRAINING, STUCK
from jaxserve.engine.live_adapters import LiveAdapters
from jaxserve.engine.metrics import EngineLoad
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stream import RequestStream
from jaxserve.engine.validation import check_num_choices
from jaxserve.text import CompiledGrammar, Tokenizer


class AsyncEngine(EngineThread):
    """An `EngineThread` with a stream per request, for the event loop that submits it."""

    @property
    def model_name(self) -> str:
        """Name on the API; the configured one until the model is loaded."""
        if self._engine is not None:
            return self._engine.model_name
        return self.config.served_model_name or self.config.model

    @property
    def max_model_len(self) -> int:
        """Most prompt and output tokens of a request."""
        return self.engine.max_model_len

    @property
    def max_choices(self) -> int:
        """Most choices that can run and wait at once."""
        return self.config.max_num_seqs + self.config.max_queue_requests

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self.engine.load

    def compile_grammar(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """See `Engine.compile_grammar`; seconds for a large one, so not on an event loop."""
        return self.engine.compile_grammar(wanted)

    @property
    def totals(self) -> EngineTotals:
        """Sums since the engine's start."""
        return self.engine.totals

    def view(self, num_iterations: int = 0) -> EngineView:
        """Its slots, queue and pages, and the last iterations."""
        return self.engine.view(num_iterations)

    def recording(self, num_iterations: int, seconds: float) -> Recording:
        """At most so many of the last iterations, of at most the last `seconds`."""
        return self.engine.recording(num_iterations, seconds)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached page; live requests keep theirs."""
        self.engine.reset_prefix_cache()

    @property
    def adapters(self) -> LiveAdapters:
        """Its LoRA adapters."""
        return LiveAdapters(self.engine.adapters, self._raise_unless_ready, self.wake)

    def start_profile(self, folder: str) -> None:
        """Begins a trace of the process by jax's profiler, written into `folder` when it stops; may take seconds.

        Raises:
          RuntimeError: one is running.
        """
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """Ends the trace and writes it; may take seconds."""
        jax.profiler.stop_trace()

    def submit(
        self,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        request_id: str | None = None,
        terms: Terms = NO_TERMS,
    ) -> RequestStream:
        """Queues one prompt: `submit_all` with one submission; call it on the event loop that will read the stream.

        Args:
          prompt: text, tokenised here unless `prompt_token_ids` is given.
          params: `n` choices are queued all or none; what is refused has disturbed nobody.
          request_id: unique among live ones; drawn when None.
          terms: priority, deadline, service class, tenant and cache salt.

        Raises:
          ValueError: a setting does not fit the model, or the prompt or the number of choices never fits.
          RejectedError: the queue is full, or the id is live.
          NotReadyError: loading or draining.
          EngineDeadError: the engine's thread has died.
          EngineStuckError: it makes no progress.
        """
        self._raise_unless_ready(params.n)
        if prompt_token_ids is None:
            if prompt is None:
                raise ValueError("prompt is missing; give text or token ids")
            prompt_token_ids = self.tokenizer.encode(prompt)
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        (stream,) = self.submit_all([Submission(prompt_token_ids, params, request_id, terms, prompt)])
        return stream

    def submit_all(self, submissions: Sequence[Submission]) -> list[RequestStream]:
        """Queues every choice of some prompts, or none; what is refused has disturbed nobody.

        Call it on the event loop that will read the streams, one per prompt and in their order.

        Raises:
          As `submit`.
        """
        num_choices = sum(submission.params.n for submission in submissions)
        self._raise_unless_ready(num_choices)
        engine, now = self.engine, time.monotonic()
        with engine.metrics.counting_refusals(num_choices):
            check_num_choices(submissions, self.max_choices)
            requests = [engine.make_requests(submission, now) for submission in submissions]
        opened = [self._open(submission) for submission in submissions]
        streams = [stream for stream, _ in opened]
        taken = self._streams.register(streams)
        if taken is not None:
            engine.metrics.rejected("duplicate_id", num_choices)
            message = f"request_id {taken!r} is live; use another or wait for its end"
            raise RejectedError(Rejection("duplicate_id", message))
        arrivals: list[tuple[Request, int, Sink]] = []
        for (stream, live), choices in zip(opened, requests, strict=True):
            live.update(dict.fromkeys(request.request_id for request in choices))
            arrivals += [
                (request, index, partial(self._push, stream, live, request.request_id))
                for index, request in enumerate(choices)
            ]
        try:
            engine.add_all(arrivals)
        except BaseException:
            for stream, live in opened:
                live.clear()
                self._streams.forget(stream)
            raise
        if self.state in (STUCK, DEAD):  # since this began
            for stream in streams:
                stream.fail(self._not_going_on())
        self.wake()
        return streams

    def abort(self, request_id: str) -> bool:
        """Ends a live request; False when there is none of that id."""
        stream = self._streams.find(request_id)
        if stream is None:
            return False
        stream.cancel()
        return True

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests and waits for the live ones.

        Past `grace_s` what is left fails with a `CutShortError`. A stuck engine is not waited for: all has failed.

        Returns:
          Whether everything finished in time.
        """
        self._lifecycle.drain()
        end = time.monotonic() + grace_s
        while self._streams.all() and time.monotonic() < end and self.state == DRAINING:
            await asyncio.sleep(0.02)
        left = self._streams.all()
        for stream in left:
            stream.fail(CutShortError("the server is shutting down; the request was cut short"))
            stream.cancel()
        return not left

    def _open(self, submission: Submission) -> tuple[RequestStream, dict[str, None]]:
        """A stream, and the ids of its choices that have not ended."""
        live: dict[str, None] = {}
        stream = RequestStream(
            submission.request_id,
            submission.prompt,
            list(submission.prompt_token_ids),
            submission.params.n,
            lambda reason: self._cancel(stream, live, reason),
        )
        return stream, live

    def _push(self, stream: RequestStream, live: dict[str, None], choice_id: str, delta: OutputDelta) -> None:
        # Forgotten first: a client that reads the end may reuse the id at once.
        if delta.finish_reason is not None:
            live.pop(choice_id, None)
            if not live:
                self._streams.forget(stream)
        stream.push(delta)

    def _cancel(self, stream: RequestStream, live: dict[str, None], reason: FinishReason) -> None:
        """Aborts the choices that have not ended; never another request that has taken over an id.

        They end as what their client is told: by the error that the stream failed with, or else for `reason`.
        """
        error, cause = stream.error, ""
        if isinstance(error, EngineDeadError | EngineStuckError | CutShortError):
            reason, cause = FinishReason.ERROR, error.code
        elif isinstance(error, RequestFailedError):  # of another choice
            reason = FinishReason.UNFOLLOWABLE if isinstance(error, UnfollowableError) else FinishReason.ERROR
        for choice_id in list(live):
            self.engine.abort(choice_id, reason, cause)
