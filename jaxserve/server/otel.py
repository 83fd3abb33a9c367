"""OpenTelemetry: a span per request, made when the request has ended. Needs the extra `otel`.

A span covers arrival to end, with an event where the request left the queue and prefill began, and one at its first
token, where decode began. Attributes follow the semantic conventions for generative AI; what these have no name for is
under `jaxserve.`. Prompts and outputs are in no attribute. Where the client sent a W3C `traceparent`, the span is a
child of the client's, and is not sent if the client's flag says that the trace is not sampled.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxserve.core import RequestRecord
from jaxserve.server.errors import status_of_end
from jaxserve.server.version import package_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MISSING = "otlp_endpoint needs OpenTelemetry: pip install 'jaxserve[otel]'"
_TIMES = {
    "jaxserve.request.time_in_queue": "queue_s",
    "jaxserve.request.time_to_first_token": "ttft_s",
    "jaxserve.request.time_per_output_token": "mean_itl_s",
}


class SpanSink:
    """A sink of `RequestFeed` that turns each record into a span.

    Args:
      exporter: gets the spans, in batches and on a thread of its own.
      model_name: called for each span; the model may not be loaded yet.
      clock: of the engine, seconds.

    Raises:
      ValueError: OpenTelemetry is not installed.
    """

    def __init__(
        self, exporter: SpanExporter, model_name: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(MISSING) from error
        self._trace = trace
        self._model_name = model_name
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "jaxserve", "service.version": package_version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxserve", package_version())

    def __call__(self, record: RequestRecord) -> None:
        """Makes the span."""
        request, metrics = record.request, record.metrics
        offset = time.time() - self._clock()

        def nanoseconds(instant: float) -> int:
            return int((offset + instant) * 1e9)

        context = self._propagator.extract({"traceparent": request.traceparent} if request.traceparent else {})
        model = self._model_name()
        span = self._tracer.start_span(
            f"{request.operation} {model}",
            context=context,
            kind=self._trace.SpanKind.SERVER,
            start_time=nanoseconds(metrics.arrived_at),
            attributes=_attributes(record, model),
        )
        if metrics.first_scheduled_at is not None:
            span.add_event("prefill", timestamp=nanoseconds(metrics.first_scheduled_at))
        if metrics.first_token_at is not None:
            span.add_event("decode", timestamp=nanoseconds(metrics.first_token_at))
        if status_of_end(record.outcome, record.rejected, record.cause) != 200:
            span.set_attribute("error.type", record.outcome)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, record.outcome))
        ended_at = metrics.arrived_at if metrics.finished_at is None else metrics.finished_at
        span.end(end_time=nanoseconds(ended_at))

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans by OTLP over HTTP.

    Args:
      endpoint: of the collector, as http://127.0.0.1:4318; `/v1/traces` is added unless it is there. Headers and
        timeouts are those of the OTEL_EXPORTER_OTLP_* environment variables.

    Raises:
      ValueError: OpenTelemetry is not installed, or the endpoint is no address.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_endpoint is {endpoint!r}; it must begin with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(MISSING) from error
    path = "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint if endpoint.endswith(path) else endpoint.rstrip("/") + path)


def _attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """The values that there are."""
    request, params = record.request, record.request.params
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.finish_reasons": None if record.rejected else (record.outcome,),
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.stop_sequences": tuple(params.stop) or None,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "jaxserve.request.tenant": request.tenant or None,
        "jaxserve.request.service_class": request.service_class or None,
        **{name: getattr(record, field) for name, field in _TIMES.items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}
