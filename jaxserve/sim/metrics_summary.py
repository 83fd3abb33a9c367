"""From a server's /metrics to a `TraceSummary`: coarser than a trace, and since the server's start.

Quantiles of a histogram are interpolated inside its buckets, as Prometheus does. What a server does not
export (what made a gap long, why a slot was idle) stays None.
"""

from __future__ import annotations

from jaxserve.sim.metric_samples import PREFIX, MetricSamples
from jaxserve.sim.trace_summary import TraceSummary


def summary_of_metrics(text: str, source: str) -> TraceSummary:
    """The summary of a Prometheus exposition.

    Raises:
      ValueError: it holds none of the server's metrics.
    """
    samples = MetricSamples(text)
    if samples.empty:
        raise ValueError(f"{source} exports no metric named {PREFIX}*; give the address of a jaxserve server")
    ended = samples.by_label("request_success_total", "finished_reason")
    rejected = samples.by_label("requests_rejected_total", "reason")
    ttft, queue = samples.spread("time_to_first_token_seconds"), samples.spread("request_queue_time_seconds")
    num_decoding = samples.total("iteration_decode_steps_count")
    live = int(samples.total("num_requests_running") + samples.total("num_requests_waiting"))
    return TraceSummary(
        source=source,
        num_iterations=int(samples.total("iteration_tokens_total_count")),
        offered=sum(ended.values()) + sum(rejected.values()) + live,
        ended={
            "completed": ended.get("stop", 0) + ended.get("length", 0),
            "aborted": ended.get("abort", 0),
            "expired": ended.get("expired", 0),
            "failed": ended.get("error", 0) + ended.get("unfollowable", 0),
        },
        rejected={reason: count for reason, count in rejected.items() if count},
        preemptions=int(samples.total("num_preemptions_total")),
        ttft_s=ttft,
        queue_s=queue,
        ttft_tail_queue_share=min(queue.p95 / ttft.p95, 1.0) if ttft and queue and ttft.p95 else None,
        itl_s=samples.spread("inter_token_latency_seconds"),
        e2e_s=samples.spread("e2e_request_latency_seconds"),
        output_tokens=samples.spread("request_generation_tokens"),
        decode_steps=samples.total("iteration_decode_steps_sum") / num_decoding if num_decoding else None,
        waiting=int(samples.total("num_requests_waiting")),
        kv_usage=samples.total("kv_cache_usage_perc"),
    )
