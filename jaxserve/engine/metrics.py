"""Prometheus metrics, under vLLM's names with the prefix `jaxserve:`.

One registry per engine. Gauges are read from the scheduler's counts when they are asked for, so that they cost an
iteration nothing. What an iteration's tokens have in common is observed once for all of them.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxserve.core import REJECTION_REASONS, EngineStuckError, FinishReason, RejectedError, Rejection
from jaxserve.engine.lifecycle import STATES
from jaxserve.engine.output_processor import RequestState
from jaxserve.engine.startup import StartupFigures

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_FAILURE_KINDS = ("error", "out_of_memory")
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)


class EngineLoad(NamedTuple):
    """How busy an engine is.

    Attributes:
      running: requests with a slot; choices count singly.
      waiting: requests in the queue.
      kv_usage: share of the KV pages in use, 0..1.
      full: why whatever comes now is refused; None when a request may find a place.
    """

    running: int
    waiting: int
    kv_usage: float
    full: Rejection | None = None


class _Histogram(Histogram):
    """A child of a histogram that takes equal values together, and finds their bucket at once."""

    def observe_each(self, amount: float, count: int = 1) -> None:
        """As `count` calls of `observe`."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class EngineMetrics:
    """The engine's counters, gauges and histograms.

    Args:
      model_name: the `model_name` label.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("num_requests_running", "Requests with a slot.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is 100 percent.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced a first token.")
        self._generation_tokens = counter("generation_tokens", "Sampled tokens.")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = counter("num_preemptions", "Requests that gave up their slot.")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _LATENCY)
        self._itl = histogram("inter_token_latency_seconds", "Gap between successive tokens of a request.", _ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduling.", _LATENCY)
        self._wasted = counter("wasted_rows", "Rows of steps whose requests had ended when the step came back.")
        self._iteration = histogram("iteration_tokens_total", "Tokens computed in an iteration.", _TOKENS)
        self._decode_steps = histogram("iteration_decode_steps", "Decode steps of an iteration that had any.", _STEPS)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of finished requests.", _TOKENS)
        self._output_length = histogram("request_generation_tokens", "Output tokens of finished requests.", _TOKENS)
        self._success = Counter(
            "jaxserve:request_success",
            "Ended requests by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._offered = counter("requests_offered", "Requests that arrived, taken or refused; choices count singly.")
        self._rejected = Counter(
            "jaxserve:requests_rejected",
            "Refused requests by reason.",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self._recomputed = Counter(
            "jaxserve:preemption_recomputed_tokens",
            "Tokens whose K/V a preemption dropped, by service class.",
            [*self._labels, "service_class"],
            registry=self.registry,
        )
        self._swapped = Counter(
            "jaxserve:preemption_swapped_bytes",
            "Bytes of K/V copied to the host or back, by service class.",
            [*self._labels, "service_class"],
            registry=self.registry,
        )
        self._step_failures = Counter(
            "jaxserve:step_failures", "Steps that failed, by kind.", [*self._labels, "kind"], registry=self.registry
        )
        for kind in STEP_FAILURE_KINDS:
            self._step_failures.labels(**self._labels, kind=kind)
        self._step_recoveries = counter("step_recoveries", "Times that the engine went on after a failed step.")
        self._failed_by_step = counter("requests_failed_by_step", "Requests ended because steps failed with them.")
        self._nan_logits = counter("nan_logits", "Requests ended because their logits were not a number.")
        self._token_budget = gauge("token_budget", "Most tokens of a step now; fewer than set when memory ran out.")
        self._compiles = counter("compiles", "Compilations of the process; constant after warm-up.")
        self._counted_compiles = 0
        self._state = Gauge(
            "jaxserve:engine_state",
            "1 for the state that the engine is in, 0 for the others.",
            [*self._labels, "state"],
            registry=self.registry,
        )
        self._step_age = gauge("step_age_seconds", "Seconds since the last progress while there is work, else 0.")
        self._stuck = counter("engine_stuck", "Times that a step took longer than step_timeout_s.")
        self._trace_errors = gauge("trace_write_errors", "1 once trace_file could not be written and ended early.")
        self._resumed = counter("engine_resumed", "Times that such a step came back, and the engine went on.")
        self._startup_s = self._by_stage(
            "startup_seconds", "What loading weights and compiling or loading programs took."
        )
        self._startup_peak = self._by_stage("startup_peak_memory_bytes", "Most memory of the process by a stage's end.")
        self._counted: dict[tuple[Counter, str], int] = {}  # of the counters by service class
        self._success_of: dict[str, Counter] = {}
        for reason in FinishReason:
            if reason is FinishReason.DISPLACED:  # counted as refused
                continue
            self._success_of[reason.value] = self._success.labels(**self._labels, finished_reason=reason.value)
        for counter in (self._recomputed, self._swapped):
            counter.labels(**self._labels, service_class="")  # there from the start, so that a rate sees the first one
        for reason in REJECTION_REASONS:
            self._rejected.labels(**self._labels, reason=reason)

    def show_load(self, read: Callable[[], EngineLoad]) -> None:
        """What the gauges show from now on; `read` is called by whoever asks for them, on any thread.

        While it raises `EngineStuckError` they show what was read last.
        """
        seen = EngineLoad(0, 0, 0.0, None)

        def load() -> EngineLoad:
            nonlocal seen
            with contextlib.suppress(EngineStuckError):
                seen = read()
            return seen

        self._running.set_function(lambda: load().running)
        self._waiting.set_function(lambda: load().waiting)
        self._kv_usage.set_function(lambda: load().kv_usage)

    def show_state(self, read_state: Callable[[], str], read_age_s: Callable[[], float]) -> None:
        """What the gauges of the engine's state show from now on; both are called on any thread."""
        for name in STATES:
            gauge = self._state.labels(**self._labels, state=name)
            gauge.set_function(lambda name=name: float(read_state() == name))
        self._step_age.set_function(read_age_s)

    def show_trace_errors(self, read: Callable[[], int]) -> None:
        """What the gauge of traces that ended early shows from now on; `read` is called on any thread."""
        self._trace_errors.set_function(read)

    def stuck(self) -> None:
        """A step takes too long."""
        self._stuck.inc()

    def resumed(self) -> None:
        """It came back."""
        self._resumed.inc()

    def queue_time(self, seconds: float) -> None:
        """A request was scheduled for the first time."""
        self._queue.observe_each(max(seconds, 0.0))

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """A prompt of `num_tokens` was looked up in the prefix cache."""
        self._cache_queries.inc(num_tokens)
        self._cache_hits.inc(num_cached)

    def sampled(self, count: int) -> None:
        """A step sampled so many tokens for live requests."""
        self._generation_tokens.inc(count)

    def first_token(self, state: RequestState, now: float) -> None:
        """The first token of `state` is about to be delivered; `sampled` counts it."""
        self._ttft.observe_each(max(now - state.metrics.arrived_at, 0.0))
        self._prompt_tokens.inc(state.request.num_prompt_tokens)

    def gaps(self, seconds: float, count: int = 1) -> None:
        """So many tokens came so long after their requests' last ones; `sampled` counts them."""
        self._itl.observe_each(max(seconds, 0.0), count)

    def finished(self, state: RequestState, reason: str) -> None:
        """A request ended, for whatever reason."""
        self._success_of[str(reason)].inc()
        self._prompt_length.observe_each(state.request.num_prompt_tokens)
        self._output_length.observe_each(state.num_output_tokens)
        if state.metrics.finished_at is not None:
            self._e2e.observe_each(max(state.metrics.finished_at - state.metrics.arrived_at, 0.0))

    def accepted(self, count: int) -> None:
        """Requests were taken; each ends in `finished` or `displaced`."""
        self._offered.inc(count)

    def rejected(self, reason: str, count: int = 1) -> None:
        """Requests were refused at submit; choices count singly, as they do when they end."""
        self._offered.inc(count)
        self._rejected.labels(**self._labels, reason=reason).inc(count)

    def failed(self, count: int = 1) -> None:
        """Requests failed on their way to the engine."""
        self._offered.inc(count)
        self._success_of[FinishReason.ERROR.value].inc(count)

    @contextlib.contextmanager
    def counting_refusals(self, num_choices: int) -> Iterator[None]:
        """So many choices are refused together by the `ValueError` or `RejectedError` that ends the block."""
        try:
            yield
        except RejectedError as error:
            self.rejected(error.rejection.reason, num_choices)
            raise
        except ValueError:
            self.rejected("invalid", num_choices)
            raise

    def displaced(self, reason: str) -> None:
        """A request that had been taken lost its place in the queue."""
        self._rejected.labels(**self._labels, reason=reason).inc()

    def preempted(self, count: int, recomputed: Mapping[str, int], swapped: Mapping[str, int]) -> None:
        """Requests gave up their slots, or came back from the host.

        Args:
          count: of those that gave up their slots.
          recomputed: tokens since the start, by service class; swapped: bytes, likewise.
        """
        self._preemptions.inc(count)
        for counter, sums in ((self._recomputed, recomputed), (self._swapped, swapped)):
            for service_class, total in sums.items():
                counted = self._counted.get((counter, service_class), 0)
                counter.labels(**self._labels, service_class=service_class).inc(total - counted)
                self._counted[counter, service_class] = total

    def step_failed(self, kind: str) -> None:
        """A step failed; `kind` is one of `STEP_FAILURE_KINDS`."""
        self._step_failures.labels(**self._labels, kind=kind).inc()

    def step_recovered(self) -> None:
        """The engine is ready again after a failed step."""
        self._step_recoveries.inc()

    def failed_by_step(self) -> None:
        """A request ended, as steps failed with it."""
        self._failed_by_step.inc()

    def nan_logits(self) -> None:
        """A request ended, as its logits were not a number."""
        self._nan_logits.inc()

    def set_token_budget(self, num_tokens: int) -> None:
        """A step has so many tokens at most."""
        self._token_budget.set(num_tokens)

    def iteration(self, tokens: int, wasted_rows: int, decode_steps: int) -> None:
        """An iteration ran, with so many rows of requests that had ended; `decode_steps` is 0 without decode rows."""
        self._iteration.observe_each(tokens)
        if decode_steps:
            self._decode_steps.observe_each(decode_steps)
        if wasted_rows:
            self._wasted.inc(wasted_rows)

    def set_compiles(self, count: int) -> None:
        """Compilations of the process so far."""
        if count != self._counted_compiles:
            self._compiles.inc(count - self._counted_compiles)
            self._counted_compiles = count

    def set_startup(self, figures: StartupFigures) -> None:
        """What the start took."""
        for stage, seconds in figures.seconds.items():
            self._startup_s.labels(**self._labels, stage=stage).set(seconds)
            self._startup_peak.labels(**self._labels, stage=stage).set(figures.peak_bytes[stage])

    def _by_stage(self, name: str, text: str) -> Gauge:
        return Gauge(f"jaxserve:{name}", text, [*self._labels, "stage"], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"jaxserve:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"jaxserve:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
        return _Histogram(f"jaxserve:{name}", text, list(self._labels), buckets=buckets, registry=self.registry).labels(
            **self._labels
        )
