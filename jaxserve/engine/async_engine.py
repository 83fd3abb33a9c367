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
from collections.abc import Callable, Sequence
from functools import partial

import jax
from absl import logging

from jaxserve.config import EngineConfig
from jaxserve.core import (
    NO_TERMS,
    EngineDeadError,
    EngineTotals,
    EngineView,
    JaxserveError,
    NotReadyError,
    Recording,
    RejectedError,
    Rejection,
    Request,
    RequestFailedError,
    SamplingParams,
    StructuredOutputs,
    Submission,
    Terms,
)
from jaxserve.engine.engine import Engine, Progress, Sink
from jaxserve.engine.live_adapters import LiveAdapters
from jaxserve.engine.metrics import EngineLoad, EngineMetrics
from jaxserve.engine.monitor import RequestListener
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stream import RequestStream
from jaxserve.engine.validation import check_num_choices
from jaxserve.text import CompiledGrammar, Tokenizer

EngineFactory = Callable[[EngineConfig, Progress], Engine]


class AsyncEngine:
    """Starts loading in its thread on `start`; usable once `state` is "ready".

    Args:
      config: engine settings.
      progress: told of loading and warm-up, on the engine's thread.
      factory: makes the engine; tests put faults in here.
      on_request_end: told of every end and refusal; see `monitor.RequestListener`.
      trace_buffer: iterations that `recording` and `view` can show.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        factory: EngineFactory | None = None,
        on_request_end: RequestListener | None = None,
        trace_buffer: int = 0,
    ) -> None:
        self.config = config
        self.model_root = config.model
        self.state = "loading"
        self.progress: tuple[int, int, str] = (0, 0, "loading")
        self.error: BaseException | None = None
        self.created = int(time.time())
        self._on_progress = progress
        self._factory = factory or (lambda config, progress: Engine(config, progress=progress))
        self._on_request_end = on_request_end
        self._trace_buffer = trace_buffer
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
    def max_choices(self) -> int:
        """Most choices that can run and wait at once."""
        return self.config.max_num_seqs + self.config.max_queue_requests

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics."""
        return self.engine.metrics

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
        """
        self._raise_unless_ready()
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
        self._raise_unless_ready()
        engine, now = self.engine, time.monotonic()
        try:
            check_num_choices(submissions, self.max_choices)
            requests = [engine.make_requests(submission, now) for submission in submissions]
        except ValueError:
            engine.metrics.rejected("invalid")
            raise
        opened = [self._open(submission) for submission in submissions]
        streams = [stream for stream, _ in opened]
        self._register(streams)
        arrivals: list[tuple[Request, int, Sink]] = []
        for (stream, live), choices in zip(opened, requests, strict=True):
            live.update(dict.fromkeys(request.request_id for request in choices))
            arrivals += [
                (request, index, partial(self._push, stream, live, request.request_id))
                for index, request in enumerate(choices)
            ]
        try:
            engine.add_all(arrivals)
        except (ValueError, RejectedError):
            for stream, live in opened:
                live.clear()
                self._forget(stream)
            raise
        if self.state == "dead":
            for stream in streams:
                stream.fail(self._dead_error())
        self.wake()
        return streams

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
        # One that died of another process may be inside a step that never ends.
        if self.state != "dead" and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        for stream in self._live():
            stream.fail(EngineDeadError("the engine was shut down"))
        if self.state != "dead":
            self.state = "stopped"

    def _run(self) -> None:
        try:
            engine = self._factory(self.config, self._progressed)
            engine.monitor.on_request_end = self._on_request_end
            engine.monitor.keep(self._trace_buffer)
            engine.on_lost(self._die)
            self._engine = engine
            self.state = "warming_up"
            engine.warm_up()
            self.state = "ready"
            while not self._stopping:
                if not engine.step():
                    self._wait(engine)
            engine.land()
            engine.close()
        except BaseException as error:
            self._die(error)

    def wake(self) -> None:
        """A request was added to the engine itself."""
        with self._work:
            self._work.notify()

    def _wait(self, engine: Engine) -> None:
        with self._work:
            if engine.has_work:  # nothing may run yet: a batch that is still filling
                self._work.wait(timeout=0.001)
            else:
                self._work.wait_for(lambda: self._stopping or engine.has_work, timeout=1.0)

    def _die(self, error: BaseException) -> None:
        if self.state == "dead":  # on another thread, of the same cause
            return
        # A model or setting that does not fit is the operator's to mend: its message says how.
        expected = self.state != "ready" and isinstance(error, ValueError | JaxserveError)
        logging.error("engine died: %r", error, exc_info=None if expected else error)
        self.error, self.state, self._stopping = error, "dead", True
        for stream in self._live():
            stream.fail(self._dead_error())
        if self._engine is not None:
            self._engine.close(error)

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
            self.metrics.rejected("draining")
            raise RejectedError(Rejection("draining", "the server is shutting down", retry_after_s=5.0))
        if self.state != "ready":
            done, total, what = self.progress
            raise NotReadyError(f"the server is starting ({what}, {done} of {total})")

    def _live(self) -> list[RequestStream]:
        with self._streams_lock:
            return list(self._streams.values())

    def _open(self, submission: Submission) -> tuple[RequestStream, dict[str, None]]:
        """A stream, and the ids of its choices that have not ended."""
        live: dict[str, None] = {}
        stream = RequestStream(
            submission.request_id,
            submission.prompt,
            list(submission.prompt_token_ids),
            submission.params.n,
            lambda: self._cancel(live),
        )
        return stream, live

    def _register(self, streams: Sequence[RequestStream]) -> None:
        """Takes the ids of all streams or of none; raises RejectedError when one is live."""
        named = {stream.request_id: stream for stream in streams}
        with self._streams_lock:
            taken = [request_id for request_id in named if request_id in self._streams]
            if not taken and len(named) == len(streams):
                self._streams.update(named)
                return
        self.engine.metrics.rejected("duplicate_id")
        request_id = taken[0] if taken else next(iter(named))
        raise RejectedError(
            Rejection("duplicate_id", f"request_id {request_id!r} is live; use another or wait for its end")
        )

    def _push(self, stream: RequestStream, live: dict[str, None], choice_id: str, delta: OutputDelta) -> None:
        # Forgotten first: a client that reads the end may reuse the id at once.
        if delta.finish_reason is not None:
            live.pop(choice_id, None)
            if not live:
                self._forget(stream)
        stream.push(delta)

    def _cancel(self, live: dict[str, None]) -> None:
        """Aborts the choices that have not ended; never another request that has taken over an id."""
        for choice_id in list(live):
            self.engine.abort(choice_id)

    def _forget(self, stream: RequestStream) -> None:
        with self._streams_lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
