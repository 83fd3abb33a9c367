"""Engine: one model, one scheduler, one runner, stepped by its owner.

    plan = scheduler.schedule(now)
    prepared = runner.prepare(plan)
    handle = runner.dispatch(prepared)
    output = runner.collect(handle)
    events = scheduler.update(plan, output.result, now)

The engine has no thread of its own: `LLM` steps it in the caller's, `AsyncEngine` in a thread. `add`
and `abort` may come from other threads at any time, also while a step runs on the device; a lock guards
the host state and is never held while the device works.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from jaxserve.config import EngineConfig
from jaxserve.core import (
    EngineTotals,
    EngineView,
    FinishReason,
    Recording,
    RejectedError,
    Request,
    StructuredOutputs,
    Submission,
)
from jaxserve.engine.grammar_state import GrammarStates, GrammarTimes
from jaxserve.engine.metrics import EngineLoad, EngineMetrics
from jaxserve.engine.monitor import EngineMonitor
from jaxserve.engine.output_processor import OutputDelta, RequestState
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.validation import ModelLimits, bad_word_ids, context_length, eos_token_ids, make_requests
from jaxserve.loading import load_model, resolve_model
from jaxserve.models import stack_layers
from jaxserve.runtime import COMPILES, ModelRunner, StepOutput, enable_compile_cache, make_mesh, scans_layers
from jaxserve.scheduler import Scheduler, StepPlan, TokenEvent, TokenEvents, TraceWriter
from jaxserve.text import CompiledGrammar, Tokenizer, load_tokenizer

Progress = Callable[[str, int, int, str], None]
"""Called with stage ("weights" or "warm-up"), done, total and what was done last."""
Sink = Callable[[OutputDelta], None]


class Engine:
    """Loads a model and runs requests on it.

    Args:
      config: settings.
      progress: told of loading and warm-up.
      clock: seconds, monotonic.

    Raises:
      ValueError: settings that do not fit the model or the machine.
      CheckpointError, UnsupportedModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._progress = progress or (lambda *_: None)
        enable_compile_cache(config.compile_cache)
        resolved = resolve_model(config.model, lambda done, total, what: self._progress("weights", done, total, what))
        self.config = config
        self.model_name = config.served_model_name or resolved.served_name
        self._tokenizer = (
            None if config.skip_tokenizer_init else load_tokenizer(resolved, config.tokenizer, config.chat_template)
        )
        self._mesh = make_mesh(config.tensor_parallel_size)
        loaded = load_model(
            resolved,
            config.dtype,
            mesh=self._mesh,
            progress=lambda done, total, what: self._progress("weights", done, total, what),
        )
        self.model_config = loaded.config
        self.max_model_len = context_length(loaded.config.max_position_embeddings, config.max_model_len)
        self.limits = ModelLimits(
            vocab_size=loaded.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=eos_token_ids(loaded.config, self._tokenizer),
        )
        self.runner = ModelRunner(
            loaded.config,
            stack_layers(loaded.params) if scans_layers(config.scan_layers, self._mesh) else loaded.params,
            config,
            self.max_model_len,
            self._mesh,
        )
        self._trace = (
            TraceWriter(config.trace_file, model=self.model_name, config=self.runner.scheduler_config)
            if config.trace_file
            else None
        )
        self.scheduler = Scheduler(self.runner.scheduler_config, trace=self._trace)
        self.metrics = EngineMetrics(self.model_name)
        self.monitor = EngineMonitor(self.scheduler, self.model_name)
        self.stats = EngineStats()
        self.draw_seed: Callable[[], int] = partial(
            (secrets.SystemRandom() if config.seed is None else random.Random(config.seed)).getrandbits, 64
        )
        # Cached: every prompt of a request has the same words.
        self._bad_word_ids = lru_cache(maxsize=256)(
            lambda words: bad_word_ids(words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        )
        self._grammars = GrammarStates(self._tokenizer, self.limits, config.max_grammar_bytes)
        self._states: dict[str, RequestState] = {}
        self.ready = False

    def warm_up(self) -> None:
        """Compiles every bucket; afterwards nothing compiles."""
        # Beside the compilations, which take longer.
        threading.Thread(target=self._grammars.prepare, name="vocabulary", daemon=True).start()
        self.runner.warm_up(lambda done, total, what: self._progress("warm-up", done, total, what))
        self.metrics.set_compiles(COMPILES.count)
        self.ready = True

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          ValueError: none was loaded.
        """
        if self._tokenizer is None:
            raise ValueError("no tokenizer is loaded (skip_tokenizer_init); give prompts as token ids")
        return self._tokenizer

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self._states)

    @property
    def load(self) -> EngineLoad:
        """How busy it is; from any thread."""
        with self._lock:
            scheduler = self.scheduler
            usable = self.runner.scheduler_config.num_pages - 1
            return EngineLoad(scheduler.num_running, scheduler.num_waiting, scheduler.pages_owned / usable)

    @property
    def grammar_times(self) -> GrammarTimes:
        """What grammars cost, summed over iterations."""
        return self._grammars.times

    def compile_grammar(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """The compiled form of a constraint; from any thread. A large one takes seconds.

        Raises:
          ValueError: it cannot be followed, or there is no tokenizer to follow it with.
        """
        return self._grammars.compile(wanted)

    @property
    def totals(self) -> EngineTotals:
        """Sums since the start; from any thread."""
        with self._lock:
            return self.monitor.totals(self.stats)

    def view(self, num_iterations: int) -> EngineView:
        """Slots, queue, pages and the last iterations; from any thread."""
        with self._lock:
            return self.monitor.view(self.stats, self._clock(), num_iterations)

    def recording(self, num_iterations: int, seconds: float) -> Recording:
        """At most so many of the last iterations, of at most the last `seconds`; from any thread."""
        with self._lock:
            return self.monitor.recording(num_iterations, self._clock() - seconds)

    def make_requests(self, submission: Submission, now: float) -> list[Request]:
        """The requests of a prompt's choices, checked against the model.

        Raises:
          ValueError: see `validation.make_requests`; or `structured_outputs`, unless the submission has it compiled,
            cannot be followed.
        """
        params = submission.params
        grammar = submission.grammar
        if grammar is None and params.structured_outputs is not None:
            grammar = self.compile_grammar(params.structured_outputs)
        requests = make_requests(
            submission.prompt_token_ids,
            params,
            self.limits,
            request_id=submission.request_id,
            terms=submission.terms,
            bad_words=self._bad_word_ids(params.bad_words) if params.bad_words else (),
            now=now,
            service_classes=self.config.service_classes,
            draw_seed=self.draw_seed,
            grammar=grammar,
        )
        self._grammars.check(requests[0])
        return requests

    def add(self, request: Request, index: int, sink: Sink) -> None:
        """Queues a request, choice `index` of its prompt; its deltas go to `sink`, on the stepping thread.

        Raises:
          ValueError: it can never fit.
          RejectedError: the queue is full, its id is live, or its deadline has passed.
        """
        self.add_all([(request, index, sink)])

    def add_all(self, arrivals: Sequence[tuple[Request, int, Sink]]) -> None:
        """Queues every one of some requests, or none and to nobody's disadvantage; each is as for `add`."""
        with self._lock:
            now = self._clock()
            rejection = self.scheduler.add_all([request for request, *_ in arrivals], now)
            self._deliver_events(self.scheduler.take_events(), None, now)
            if rejection is not None:
                self.metrics.rejected(rejection.reason, len(arrivals))
                for request, index, _ in arrivals:
                    self.monitor.rejected(request, index, rejection.reason, now)
                if rejection.reason == "never_fits":
                    raise ValueError(rejection.message)
                raise RejectedError(rejection)
            for request, index, sink in arrivals:
                grammar = self._grammars.add(request)
                self._states[request.request_id] = RequestState(request, index, self._tokenizer, sink, now, grammar)
            self._observe_load()

    def abort(self, request_id: str, reason: str = FinishReason.ABORT) -> bool:
        """Ends a request at any stage; False when it is not live. Its last delta is delivered."""
        with self._lock:
            if request_id not in self._states:
                return False
            now = self._clock()
            self.scheduler.abort(request_id, now, reason)
            self._deliver_events(self.scheduler.take_events(), None, now)
            self._observe_load()
            return True

    def abort_all(self, reason: str = FinishReason.ABORT) -> None:
        """Ends every live request."""
        with self._lock:
            for request_id in list(self._states):
                self.abort(request_id, reason)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached page."""
        with self._lock:
            self.scheduler.reset_prefix_cache(self._clock())

    def step(self) -> bool:
        """Runs one iteration.

        Returns:
          Whether anything ran; False when no request is live or all that were have just ended.
        """
        began = time.perf_counter()
        with self._lock:
            planned_at = now = self._clock()
            plan = self.scheduler.schedule(now)
            self._deliver_events(self.scheduler.take_events(), None, now)
            if plan.empty:
                self._observe_load()
                return False
            self._mark_scheduled(plan, now)
            if plan.preempted or plan.swaps:
                self._count_preemptions(plan)
            prepared = self.runner.prepare(plan, self._request_of, self._outputs_of)
            bucket = prepared.tables.bucket
            bound = self._grammars.rows(plan, bucket)
        masks = partial(self._grammars.masks, bound, bucket) if bound else None
        handle = self.runner.dispatch(prepared, masks)
        dispatched = time.perf_counter()
        output = self.runner.collect(handle)
        collected = time.perf_counter()
        if bound:
            self._grammars.accept(bound, output.result, bucket)
        with self._lock:
            now = self._clock()
            self._take_prompt_scores(plan, output)
            events = self.scheduler.update(plan, output.result, now, bucket=output.bucket.name)
            self._deliver_step(events, output, now)
            # Stop strings found just now ended their requests: nothing is left to say about those.
            self.scheduler.take_events()
            self.stats.count(plan, output.bucket, events.num_tokens)
            self.metrics.iteration(plan.num_tokens)
            self.monitor.iteration(plan, output.bucket.name, planned_at, now)
            self._observe_load()
        self.stats.device_s += collected - dispatched
        self.stats.host_s += (dispatched - began) + (time.perf_counter() - collected)
        return True

    def close(self) -> None:
        """Writes what is left of the trace and closes it."""
        if self._trace:
            self.scheduler.flush_trace()
            self._trace.close()

    def _request_of(self, request_id: str) -> Request:
        return self.scheduler.sequence(request_id).request

    def _outputs_of(self, request_id: str) -> list[int]:
        return self.scheduler.sequence(request_id).output_token_ids

    def _mark_scheduled(self, plan: StepPlan, now: float) -> None:
        for placement in plan.placements:
            state = self._states[placement.request_id]
            if state.metrics.first_scheduled_at is None:
                state.metrics.first_scheduled_at = now
                state.num_cached_tokens = placement.num_cached_tokens
                if self.config.enable_prefix_caching:
                    self.metrics.looked_up(state.request.num_prompt_tokens, placement.num_cached_tokens)
                    self.stats.cache_queries += state.request.num_prompt_tokens
                    self.stats.cache_hits += placement.num_cached_tokens
                self.metrics.queue_time(now - state.metrics.arrived_at)

    def _take_prompt_scores(self, plan: StepPlan, output: StepOutput) -> None:
        first = 0
        for chunk in plan.prefill:
            state = self._states.get(chunk.request_id)
            if state is not None:
                state.take_prompt_scores(chunk, first, output)
            first += len(chunk.token_ids)

    def _deliver_step(self, events: TokenEvents, output: StepOutput, now: float) -> None:
        """What an update brought; decode rows by column, as most have a token and nothing else."""
        self.metrics.sampled(events.num_tokens)
        ends = events.ends
        for request_id, token_id, row in zip(events.request_ids, events.token_ids, events.rows, strict=True):
            self._deliver(request_id, token_id, "decode", row, ends.get(row), output, now)
        self._deliver_events(events.prefill, output, now)

    def _deliver_events(self, events: list[TokenEvent], output: StepOutput | None, now: float) -> None:
        for event in events:
            end = None if event.finish_reason is None else event
            self._deliver(event.request_id, event.token_id, event.source, event.row, end, output, now)

    def _deliver(
        self,
        request_id: str,
        token_id: int | None,
        source: str,
        row: int,
        end: TokenEvent | None,
        output: StepOutput | None,
        now: float,
    ) -> None:
        """A token, an end or both, of a request that is live unless a stop string ended it; see `RequestState.take`."""
        state = self._states.get(request_id)
        if state is None:
            return
        if token_id is not None:
            self.metrics.token(state, now)
        try:
            stopped = state.take(token_id, source, row, end, output, now)
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
            self.scheduler.abort(request_id, now, reason)
        del self._states[request_id]
        self._grammars.drop(request_id)
        if reason == FinishReason.DISPLACED:
            self.metrics.rejected(reason)
        else:
            self.metrics.finished(state, reason)
        self.monitor.ended(state, reason, now)

    def _count_preemptions(self, plan: StepPlan) -> None:
        counters, page_bytes = self.scheduler.counters, self.runner.page_bytes
        swapped = {name: pages * page_bytes for name, pages in counters.swapped_pages_of.items()}
        self.metrics.preempted(len(plan.preempted), counters.recomputed_tokens_of, swapped)

    def _observe_load(self) -> None:
        self.metrics.load(self.load)
        self.metrics.set_compiles(COMPILES.count)
