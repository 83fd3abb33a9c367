"""Spans: one per request, by the conventions, beneath the client's."""

import logging
import sys

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxserve.core import Request, RequestMetrics, RequestRecord, SamplingParams
from jaxserve.server.__main__ import main
from jaxserve.server.otel import SpanSink, otlp_exporter
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import until

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flag}" for flag in ("01", "00"))


@pytest.fixture
def spans_of():
    """`spans_of(*records)`: the spans that they become, on a clock that stands at 20."""

    def make(*records):
        exporter = InMemorySpanExporter()
        sink = SpanSink(exporter, lambda: "tiny", clock=lambda: 20.0)
        for record in records:
            sink(record)
        sink.close()
        return exporter.get_finished_spans()

    return make


def record(outcome="stop", rejected=False, metrics=None, **fields):
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=7, stop=("END",))
    given = dict(max_tokens=64, tenant="alice", operation="chat") | fields
    request = Request("cmpl-1", tuple(b"secret prompt"), params, **given)
    metrics = metrics or RequestMetrics(10.0, 10.5, 11.0, 13.0)
    return RequestRecord(request, 0, outcome, rejected, metrics, 13.0, 5, 2)


def test_a_span_has_the_conventions_attributes_and_the_phases_as_events(spans_of):
    (span,) = spans_of(record())
    assert span.name == "chat tiny" and span.status.status_code is StatusCode.UNSET and span.parent is None
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.usage.input_tokens": 13,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "jaxserve.request.tenant": "alice",
        "jaxserve.request.time_in_queue": 0.5,
        "jaxserve.request.time_to_first_token": 1.0,
        "jaxserve.request.time_per_output_token": 0.5,
    }
    after = [(event.name, round((event.timestamp - span.start_time) / 1e9, 3)) for event in span.events]
    assert after == [("prefill", 0.5), ("decode", 1.0)]
    assert span.end_time - span.start_time == pytest.approx(3e9, abs=1e6)
    assert span.resource.attributes["service.name"] == "jaxserve" and "secret" not in span.to_json()


@pytest.mark.parametrize("outcome", ["abort", "expired", "error"])
def test_what_is_no_completion_is_an_error_with_its_reason(spans_of, outcome):
    (span,) = spans_of(record(outcome))
    assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == outcome


def test_a_refused_request_has_a_span_without_events(spans_of):
    (span,) = spans_of(record("queue_full_requests", True, RequestMetrics(10.0)))
    assert span.attributes["error.type"] == "queue_full_requests" and not span.events
    assert "gen_ai.response.finish_reasons" not in span.attributes and span.start_time == span.end_time


def test_it_is_a_child_of_the_clients_span_and_left_out_when_that_is_not_sampled(spans_of):
    (span,) = spans_of(record(traceparent=SAMPLED), record(traceparent=NOT_SAMPLED))
    assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == PARENT_ID


@pytest.mark.parametrize("broken", ["", "00-0-0-01", f"ff-{TRACE_ID}-{PARENT_ID}-01", "x" * 256])
def test_a_broken_traceparent_is_as_good_as_none(spans_of, broken):
    (span,) = spans_of(record(traceparent=broken))
    assert span.parent is None


@pytest.fixture
def live_records(server):
    """Records of what the shared server ends from now on."""
    records = []
    monitor = server.engine.engine.monitor
    monitor.on_request_end = records.append
    yield records
    monitor.on_request_end = None


def test_http_and_grpc_take_over_the_clients_trace(server, client, live_records):
    headers = {"traceparent": SAMPLED}
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    client.post("/v1/chat/completions", json=chat, headers={"traceparent": "x" * 5000})
    with grpc.insecure_channel(server.grpc_address) as channel:
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
        list(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=[("traceparent", SAMPLED)]))
    until(lambda: len(live_records) == 3, what="three ends")
    requests = [each.request for each in live_records]
    assert [each.operation for each in requests] == ["text_completion", "chat", "text_completion"]
    assert [each.traceparent for each in requests] == [SAMPLED, "x" * 256, SAMPLED]
    assert all(each.e2e_s >= each.ttft_s >= each.queue_s >= 0 for each in live_records)


def test_an_endpoint_that_is_no_address_and_a_missing_extra_are_told(monkeypatch, capsys):
    with pytest.raises(ValueError, match="must begin with http"):
        otlp_exporter("localhost:4318")
    with pytest.raises(SystemExit):
        main(["prog", "--otlp_endpoint=localhost:4318"])
    assert "--otlp_endpoint is 'localhost:4318'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[otel\]'"):
        otlp_exporter("http://127.0.0.1:4318")


def test_a_collector_that_is_away_costs_no_request(caplog):
    caplog.set_level(logging.CRITICAL)
    sink = SpanSink(otlp_exporter("http://127.0.0.1:1"), lambda: "tiny")
    sink(record())
    sink.close()
