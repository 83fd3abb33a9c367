"""Engine: one model, one scheduler, one runner, stepped by its owner.

    plan = scheduler.schedule(now)
    prepared = runner.prepare(plan)
    handle = runner.dispatch(prepared)
    runner.sample(handle)
    output = runner.collect(handle)
    events = scheduler.update(plan, output.result, now)

`Iterations` has the loop body, in which the next step is dispatched before the last one is collected.

The engine has no thread of its own: `LLM` steps it in the caller's, `AsyncEngine` in a thread. `add` and `abort`
may come from other threads at any time, also while steps run on the device; a lock guards the host state and is
never held while the host waits for the device. Where it is never given back, other threads get `EngineStuckError`.
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
    EngineStuckError,
    EngineTotals,
    EngineView,
    FinishReason,
    HostLostError,
    Recording,
    RejectedError,
    Request,
    StructuredOutputs,
    Submission,
)
from jaxserve.engine.adapters import Adapters
from jaxserve.engine.crash_dump import LOCK_S, CrashDump
from jaxserve.engine.delivery import Delivery, Sink
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.engine.grammar_state import GrammarStates, GrammarTimes
from jaxserve.engine.iteration import Iterations
from jaxserve.engine.kv_moves import with_kv
from jaxserve.engine.metrics import EngineLoad, EngineMetrics
from jaxserve.engine.monitor import EngineMonitor
from jaxserve.engine.output_processor import RequestState
from jaxserve.engine.served_model import agree, load_served_model, make_runner
from jaxserve.engine.startup import PROGRAMS, WEIGHTS, StartupFigures
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.step_recovery import StepRecovery
from jaxserve.engine.validation import ModelLimits, bad_word_ids, eos_token_ids, make_requests
from jaxserve.hosts import lead
from jaxserve.loading import resolve_model
from jaxserve.runtime import COMPILES, enable_compile_cache
from jaxserve.scheduler import Scheduler, TraceWriter
from jaxserve.scheduler.trace import both
from jaxserve.text import CompiledGrammar, Tokenizer, load_tokenizer

Progress = Callable[[str, int, int, str], None]
"""Called with stage ("weights" or "warm-up"), done, total and what was done last."""


class Engine:
    """Loads a model and runs requests on it.

    Args:
      config: settings.
      progress: told of loading and warm-up.
      clock: seconds, monotonic.

    Raises:
      ValueError: settings that do not fit the model or the machine.
      CheckpointError, UnsupportedModelError: the model cannot be loaded.
      HostLostError: another process of the engine does not come, or fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = EngineLock()
        self._late_aborts: list[tuple[RequestState, str, str]] = []
        self._progress = progress or (lambda *_: None)
        self._followers = lead(config)
        enable_compile_cache(config.compile_cache)
        resolved = resolve_model(config.model, lambda done, total, what: self._progress("weights", done, total, what))
        self.config = config
        self.model_name = config.served_model_name or resolved.served_name
        self._tokenizer = (
            None
            if config.skip_tokenizer_init
            else load_tokenizer(resolved, config.tokenizer, config.chat_template, config.special_tokens_in_chat)
        )
        agree(self._followers, config, resolved)
        self._startup = StartupFigures()
        with self._startup.stage(WEIGHTS):
            served = load_served_model(
                config, resolved, lambda done, total, what: self._progress("weights", done, total, what)
            )
        self.model_config = served.config
        self.max_model_len = served.max_model_len
        self.limits = ModelLimits(
            vocab_size=served.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=eos_token_ids(served.config, self._tokenizer),
        )
        with self._startup.stage(PROGRAMS):
            self.runner = make_runner(self._followers, config, served)
        self._trace = (
            TraceWriter(config.trace_file, model=self.model_name, config=self.runner.scheduler_config)
            if config.trace_file
            else None
        )
        self._crash_dump = CrashDump(config.crash_dump_dir, self.model_name) if config.crash_dump_dir else None
        self.scheduler = Scheduler(
            self.runner.scheduler_config, trace=both(self._trace, self._crash_dump and self._crash_dump.ring)
        )
        self.metrics = EngineMetrics(self.model_name)
        self.metrics.show_load(lambda: self.load)
        if self._trace is not None:
            self.metrics.show_trace_errors(lambda trace=self._trace: trace.num_errors)
        self.monitor = EngineMonitor(self.scheduler, self.model_name)
        self.draw_seed: Callable[[], int] = partial(
            (secrets.SystemRandom() if config.seed is None else random.Random(config.seed)).getrandbits, 64
        )
        # Cached: every prompt of a request has the same words.
        self._bad_word_ids = lru_cache(maxsize=256)(
            lambda words: bad_word_ids(words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        )
        self._grammars = GrammarStates(self._tokenizer, self.limits, config.max_grammar_bytes)
        self._delivery = Delivery(self.scheduler, self.metrics, self.monitor, self._grammars, self._tokenizer)
        self.adapters = Adapters(
            config,
            served.config,
            self.model_name,
            stacked=served.form == "stacked",
            lock=self._lock,
            put=self.runner.place_adapter,
            live_places=lambda: [state.request.adapter_place for state in self._delivery.states.values()],
        )
        self._iterations = Iterations(
            self.scheduler,
            self.runner,
            self._grammars,
            self._delivery,
            self.metrics,
            self.monitor,
            StepRecovery(
                self.scheduler,
                self.runner,
                self._delivery,
                self.metrics,
                lock=self._lock,
                clock=self._clock,
                alone=self._followers is None,
            ),
            cached=config.enable_prefix_caching,
            lock=self._lock,
            clock=self._clock,
            on_step=self._count_compiles,
        )
        self.ready = False

    def warm_up(self) -> None:
        """Compiles every bucket; afterwards nothing compiles."""
        # Beside the compilations, which take longer.
        threading.Thread(target=self._grammars.prepare, name="vocabulary", daemon=True).start()
        with self._startup.stage(PROGRAMS):
            self.runner.warm_up(lambda done, total, what: self._progress("warm-up", done, total, what))
        self.adapters.place_pending()
        self.metrics.set_startup(self._startup)
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
        """Whether a request is live, a step in flight is to be taken in, or an adapter is to be placed."""
        return bool(self._delivery.states) or self._iterations.num_in_flight > 0 or self.adapters.has_pending

    @property
    def gathers(self) -> bool:
        """Whether all that is live waits on purpose; see `Scheduler.gathers`."""
        with self._lock:
            return self.scheduler.gathers(self._clock())

    @property
    def stats(self) -> EngineStats:
        """Sums over iterations; may be replaced between steps."""
        return self._iterations.stats

    @stats.setter
    def stats(self, stats: EngineStats) -> None:
        self._iterations.stats = stats

    @property
    def load(self) -> EngineLoad:
        """How busy it is; from any thread."""
        with self._lock.soon():
            scheduler = self.scheduler
            usable = self.runner.scheduler_config.num_pages - 1
            full = scheduler.refusal_of_any(self._clock())
            return EngineLoad(scheduler.num_running, scheduler.num_waiting, scheduler.pages_owned / usable, full)

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
        with self._lock.soon():
            return self.monitor.totals(self.stats)

    def view(self, num_iterations: int) -> EngineView:
        """Slots, queue, pages and the last iterations; from any thread."""
        with self._lock.soon():
            return self.monitor.view(self.stats, self._clock(), num_iterations)

    def recording(self, num_iterations: int, seconds: float) -> Recording:
        """At most so many of the last iterations, of at most the last `seconds`; from any thread."""
        with self._lock.soon():
            return self.monitor.recording(num_iterations, self._clock() - seconds)

    def make_requests(self, submission: Submission, now: float) -> list[Request]:
        """The requests of a prompt's choices, checked against the model; a refusal is not counted.

        Raises:
          ValueError: see `validation.make_requests`; or `structured_outputs`, unless the submission has it compiled,
            cannot be followed.
          RejectedError: its adapter is not loaded.
        """
        params = submission.params
        grammar = submission.grammar
        if grammar is None and params.structured_outputs is not None:
            grammar = self.compile_grammar(params.structured_outputs)
        now = now if submission.received_at is None else submission.received_at
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
            adapter=self.adapters.find(submission.adapter),
        )
        self._grammars.check(requests[0])
        return with_kv(requests, submission)

    def add(self, request: Request, index: int, sink: Sink) -> None:
        """Queues a request, choice `index` of its prompt; its deltas go to `sink`, on the stepping thread.

        Raises:
          ValueError: it can never fit.
          RejectedError: the queue is full, its id is live, its deadline has passed, or its adapter was unloaded.
        """
        self.add_all([(request, index, sink)])

    def add_all(self, arrivals: Sequence[tuple[Request, int, Sink]]) -> None:
        """Queues every one of some requests, or none and to nobody's disadvantage; each is as for `add`."""
        with self._lock.soon():
            now = self._clock()
            requests = [request for request, *_ in arrivals]
            rejection = self.adapters.refusal(requests) or self.scheduler.add_all(requests, now)
            self._delivery.take_early_ends(now)
            if rejection is not None:
                self.metrics.rejected(rejection.reason, len(arrivals))
                for request, index, _ in arrivals:
                    self.monitor.rejected(request, index, rejection.reason, now)
                if rejection.reason == "never_fits":
                    raise ValueError(rejection.message)
                raise RejectedError(rejection)
            self.metrics.accepted(len(arrivals))
            for request, index, sink in arrivals:
                self._delivery.open(request, index, sink, now if request.received_at is None else request.received_at)

    def abort(self, request_id: str, reason: str = FinishReason.ABORT, cause: str = "") -> bool:
        """Ends a request at any stage; False when it is not live. Its last delta is delivered.

        `cause`: see `RequestRecord`.
        """
        state = self._delivery.states.get(request_id)
        if state is None:
            return False
        try:
            with self._lock.soon():
                return self._delivery.abort(state, reason, self._clock(), cause)
        except EngineStuckError:
            self._late_aborts.append((state, reason, cause))  # for the next step, if there is one
            return True

    def abort_all(self, reason: str = FinishReason.ABORT) -> None:
        """Ends every live request."""
        with self._lock.soon():
            for request_id in list(self._delivery.states):
                self.abort(request_id, reason)

    def num_cached_tokens(self, submission: Submission) -> int:
        """Tokens of a prompt's beginning whose K/V is in the prefix cache at this moment.

        Raises:
          RejectedError: its adapter is not loaded.
        """
        adapter, terms = self.adapters.find(submission.adapter), submission.terms
        request = Request(
            submission.request_id,
            tuple(submission.prompt_token_ids),
            tenant=terms.tenant,
            cache_salt=terms.cache_salt,
            adapter=adapter.number if adapter else 0,
        )
        with self._lock.soon():
            return self.scheduler.num_cached_tokens(request)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached page."""
        with self._lock.soon():
            self.scheduler.reset_prefix_cache(self._clock())

    def step(self) -> bool:
        """Places adapters, dispatches the next iteration and takes in what came back; see `Iterations.step`.

        Returns:
          Whether anything was dispatched or taken in; False when no request is live or all that were have just
          ended, and when those that are live may not run yet.
        """
        while self._late_aborts:
            state, reason, cause = self._late_aborts.pop(0)
            with self._lock:
                self._delivery.abort(state, reason, self._clock(), cause)
        placed = self.adapters.has_pending and self.adapters.place_pending()
        return self._iterations.step() or placed

    def land(self) -> None:
        """Waits for the steps in flight and takes them in, without starting another."""
        self._iterations.land()

    def on_lost(self, call: Callable[[BaseException], None]) -> None:
        """Has `call` told, on another thread, when a process that the engine needs is lost; `step` may then not end."""
        if self._followers is not None:
            self._followers.on_lost = call
            if self._followers.error is not None:
                call(self._followers.error)

    def close(self, error: BaseException | None = None) -> None:
        """Writes what is left of the trace and closes it; other processes end.

        Args:
          error: what the engine died of; its last iterations are written, where they are kept.
        """
        if error is not None and self._followers is not None:
            self._followers.lose(HostLostError(f"process 0 failed: {type(error).__name__}: {error}"))
        if error is not None and self._crash_dump is not None:
            self._crash_dump.write(error, self.config, self.scheduler, self._lock)
        if self._followers is not None:
            self._followers.close()
        # A step that hangs may have the lock for ever; its trace has whole lines all the same.
        with self._lock.within(LOCK_S if self._trace else 0.0) as taken:
            if self._trace and taken:
                self.scheduler.flush_trace()
                self._trace.close()

    def _count_compiles(self) -> None:
        if self._crash_dump is not None:
            self._crash_dump.ring.after_update(self.scheduler)
        self.metrics.set_compiles(COMPILES.count)
