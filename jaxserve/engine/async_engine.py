"""AsyncEngine: an Engine in a thread of its own, for asyncio servers.

States: loading -> warming_up -> ready -> draining -> stopped; dead from anywhere, by an exception in
the thread. `submit` decides at once, in the caller's thread: a full queue is answered in microseconds,
however long the running step takes. A dead engine fails every open stream and every later submit.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from absl import logging

from jaxserve.config import EngineConfig
from jaxserve.core import (
    EngineDeadError,
    FinishReason,
    JaxserveError,
    NotReadyError,
    Priority,
    RejectedError,
    Rejection,
    RequestFailedError,
    SamplingParams,
)
from jaxserve.engine.engine import Engine, Progress
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stream import RequestStream
from jaxserve.engine.validation import make_requests
from jaxserve.text import Tokenizer

EngineFactory = Callable[[EngineConfig, Progress], Engine]


class AsyncEngine:
    """Starts loading in its thread on `start`; usable once `state` is "ready".

    Args:
      config: engine settings.
      progress: told of loading and warm-up, on the engine's thread.
      factory: makes the engine; tests put faults in here.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        factory: EngineFactory | None = None,
    ) -> None:
        self.config = config
        self.state = "loading"
        self.progress: tuple[int, int, str] = (0, 0, "loading")
        self.error: BaseException | None = None
        self.created = int(time.time())
        self._on_progress = progress
        self._factory = factory or (lambda config, progress: Engine(config, progress=progress))
        self._engine: Engine | None = None
        self._work = threading.Condition()
        self._stopping = False
        self._streams: dict[str, RequestStream] = {}
        self._streams_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins loading and warm-up; returns at once."""
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
          NotReadyError: the model is still loading.
        """
        if self._engine is None:
            self._raise_unless_ready()
            raise NotReadyError("the model is loading")
        return self._engine

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
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics."""
        return self.engine.metrics

    def submit(
        self,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> RequestStream:
        """Queues a request; call it on the event loop that will read the stream.

        Args:
          prompt: text, tokenised here unless `prompt_token_ids` is given.
          params: `n` choices are queued all or none.
          request_id: unique among live ones; drawn when None.
          deadline_s: seconds from now after which it expires.

        Raises:
          ValueError: a setting does not fit the model, the prompt never fits, or the id is live.
          RejectedError: the queue is full.
          NotReadyError: loading or draining.
          EngineDeadError: the engine's thread has died.
        """
        self._raise_unless_ready()
        engine = self.engine
        if prompt_token_ids is None:
            if prompt is None:
                raise ValueError("prompt is missing; give text or token ids")
            prompt_token_ids = engine.tokenizer.encode(prompt)
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        requests = make_requests(
            prompt_token_ids,
            params,
            engine.limits,
            request_id=request_id,
            priority=priority,
            deadline_at=None if deadline_s is None else time.monotonic() + deadline_s,
        )
        ids = [request.request_id for request in requests]
        with self._streams_lock:
            if request_id in self._streams:
                raise ValueError(f"request_id {request_id!r} is live already; use another or wait for its end")
            stream = RequestStream(
                request_id, prompt, list(prompt_token_ids), params.n, partial(self._abort_all, request_id, ids)
            )
            self._streams[request_id] = stream
        left = _Countdown(len(requests), partial(self._forget, request_id))
        added: list[str] = []
        try:
            for index, request in enumerate(requests):
                engine.add(request, index, partial(_push, stream, left))
                added.append(request.request_id)
        except (ValueError, RejectedError):
            self._forget(request_id)
            for choice_id in added:
                engine.abort(choice_id)
            raise
        if self.state == "dead":
            stream.fail(self._dead_error())
        with self._work:
            self._work.notify()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a live request; False when there is none of that id."""
        with self._streams_lock:
            stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.cancel()
        return True

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests and waits for the live ones.

        Past `grace_s` what is left fails with a `RequestFailedError`.

        Returns:
          Whether everything finished in time.
        """
        if self.state == "ready":
            self.state = "draining"
        end = time.monotonic() + grace_s
        while self._live() and time.monotonic() < end and self.state == "draining":
            await asyncio.sleep(0.02)
        left = self._live()
        for stream in left:
            stream.fail(RequestFailedError("the server is shutting down; the request was cut short"))
            stream.cancel()
        return not left

    def shutdown(self) -> None:
        """Ends the thread; open streams fail."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        for stream in self._live():
            stream.fail(EngineDeadError("the engine was shut down"))
        if self.state != "dead":
            self.state = "stopped"

    def _run(self) -> None:
        try:
            engine = self._factory(self.config, self._progressed)
            self._engine = engine
            self.state = "warming_up"
            engine.warm_up()
            self.state = "ready"
            while not self._stopping:
                if not engine.step():
                    self._wait(engine)
            engine.close()
        except BaseException as error:
            self._die(error)

    def _wait(self, engine: Engine) -> None:
        with self._work:
            # A live request that cannot run yet (its deadline may pass) is looked at again soon.
            if not self._stopping:
                self._work.wait_for(lambda: self._stopping or engine.has_work, timeout=0.05 if engine.has_work else 1.0)

    def _die(self, error: BaseException) -> None:
        # A model or setting that does not fit is the operator's to mend: its message says how.
        expected = self.state != "ready" and isinstance(error, ValueError | JaxserveError)
        logging.error("engine died: %r", error, exc_info=None if expected else error)
        self.error = error
        self.state = "dead"
        for stream in self._live():
            stream.fail(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        return EngineDeadError(f"the engine died: {type(self.error).__name__}; the server must be restarted")

    def _progressed(self, stage: str, done: int, total: int, what: str) -> None:
        self.progress = (done, total, f"{stage}: {what}")
        if self._on_progress:
            self._on_progress(stage, done, total, what)

    def _raise_unless_ready(self) -> None:
        if self.state == "dead":
            raise self._dead_error()
        if self.state in ("draining", "stopped"):
            raise RejectedError(Rejection("draining", "the server is shutting down", retry_after_s=5.0))
        if self.state != "ready":
            done, total, what = self.progress
            raise NotReadyError(f"the server is starting ({what}, {done} of {total})")

    def _live(self) -> list[RequestStream]:
        with self._streams_lock:
            return list(self._streams.values())

    def _forget(self, request_id: str) -> None:
        with self._streams_lock:
            self._streams.pop(request_id, None)

    def _abort_all(self, request_id: str, choice_ids: list[str]) -> None:
        if self._engine is not None:
            for choice_id in choice_ids:
                self._engine.abort(choice_id)
        self._forget(request_id)


class _Countdown:
    """Calls `at_zero` when as many choices as there are have ended."""

    def __init__(self, count: int, at_zero: Callable[[], None]) -> None:
        self._count = count
        self._at_zero = at_zero

    def down(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._at_zero()


def _push(stream: RequestStream, left: _Countdown, delta: OutputDelta) -> None:
    # Forgotten first: a client that reads the end may reuse the id at once.
    if delta.finish_reason is not None:
        left.down()
    if delta.finish_reason == FinishReason.ERROR:
        stream.fail(RequestFailedError(f"request {stream.request_id} failed inside the server; others go on"))
    stream.push(delta)
