"""RequestStream: the asyncio end of one client request, fed by the engine's thread.

Back-pressure without blocking the engine: deltas that the reader has not taken are merged per choice,
so a stalled reader costs its own output's size and nobody else's time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from jaxserve.core import (
    CompletionOutput,
    FinishReason,
    JaxserveError,
    RejectedError,
    Rejection,
    RequestFailedError,
    RequestOutput,
    UnfollowableError,
)
from jaxserve.engine.output_processor import OutputDelta

_DISPLACED = Rejection(
    "displaced", "a request of higher class took this one's place in the full queue; try again later", retry_after_s=1.0
)


class RequestStream:
    """Deltas of a request's choices; for one consumer, on the event loop it was made on.

    Args:
      request_id: the client's id.
      prompt: its text, when it was text.
      prompt_token_ids: int[L].
      n: choices.
      cancel: aborts what is left of the request, for the reason given.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        n: int,
        cancel: Callable[[FinishReason], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.n = n
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake = asyncio.Event()
        self._signalled = False
        self._pending: dict[int, OutputDelta] = {}
        self._open = n
        self._error: BaseException | None = None
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache by choice 0; known at its end."""

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    @property
    def num_pending(self) -> int:
        """Choices with a delta that the reader has not taken."""
        return len(self._pending)

    def push(self, delta: OutputDelta) -> None:
        """Adds a delta, unless the stream has failed; one that tells of a failure fails it. From any thread."""
        error = _failure(delta, self.request_id)
        if error is not None:
            self.fail(error)
            return
        with self._lock:
            if self._error is not None:
                return
            earlier = self._pending.get(delta.index)
            if earlier is None:
                self._pending[delta.index] = delta
            else:
                earlier.merge(delta)
            self._signal()

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error, after what is pending; from any thread."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._signal()

    def cancel(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Aborts what still runs, for `reason` unless the stream has failed; harmless when nothing runs."""
        self._cancel(reason)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Yields deltas until every choice ended.

        Raises:
          EngineDeadError, RequestFailedError, RejectedError: what `fail` was given.
        """
        while self._open:
            await self._wake.wait()
            with self._lock:
                self._wake.clear()
                self._signalled = False
                deltas, self._pending = self._pending, {}
                error = self._error
            for delta in deltas.values():
                if delta.finish_reason is not None:
                    self._open -= 1
                    if delta.index == 0:
                        self.num_cached_tokens = delta.num_cached_tokens
                yield delta
            if error is not None and self._open:
                raise error

    async def collect(self) -> RequestOutput:
        """The whole output."""
        outputs = [CompletionOutput(index) for index in range(self.n)]
        prompt_logprobs = None
        async for delta in self:
            prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
            append_delta(outputs[delta.index], delta)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                # The loop is closed: nobody reads any more.
                return


def _failure(delta: OutputDelta, request_id: str) -> JaxserveError | None:
    """The error behind the end of a choice that fails its whole request."""
    match delta.finish_reason:
        case FinishReason.DISPLACED:
            return RejectedError(_DISPLACED)
        case FinishReason.UNFOLLOWABLE:
            return UnfollowableError(delta.error)
        case FinishReason.ERROR:
            return RequestFailedError(delta.error or f"request {request_id} failed inside the server; others go on")
    return None


def append_delta(output: CompletionOutput, delta: OutputDelta) -> None:
    """Adds a delta to a whole output."""
    output.text += delta.text
    output.token_ids += delta.token_ids
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + delta.logprobs
    output.finish_reason = delta.finish_reason
    output.stop_reason = delta.stop_reason
    output.error = delta.error
    output.metrics = delta.metrics
