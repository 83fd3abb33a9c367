"""From a server's /metrics to a `TraceSummary`: coarser than a trace, and since the server's start.

Quantiles of a histogram are interpolated inside its buckets, as Prometheus does. What a server does not
export (what made a gap long, why a slot was idle) stays None.
"""

from __future__ import annotations

import re
from collections import defaultdict

from jaxserve.sim.spread import Spread
from jaxserve.sim.trace_summary import TraceSummary

PREFIX = "jaxserve:"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Samples:
    """The samples of an exposition text, by name without the prefix."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match and match["name"].startswith(PREFIX):
                labels = dict(_LABEL.findall(match["labels"] or ""))
                self._by_name[match["name"].removeprefix(PREFIX)].append((labels, float(match["value"])))

    @property
    def empty(self) -> bool:
        """There is none."""
        return not self._by_name

    def total(self, name: str) -> float:
        """Sum over all labels."""
        return sum(value for _, value in self._by_name.get(name, ()))

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums by the value of a label."""
        sums: dict[str, int] = defaultdict(int)
        for labels, value in self._by_name.get(name, ()):
            sums[labels.get(label, "")] += int(value)
        return dict(sums)

    def spread(self, name: str) -> Spread | None:
        """Of a histogram; None when it is empty. Its maximum is the bound of the last bucket in use."""
        counts: dict[float, float] = defaultdict(float)
        for labels, value in self._by_name.get(f"{name}_bucket", ()):
            counts[float(labels["le"])] += value
        buckets = sorted(counts.items())
        if not buckets or not buckets[-1][1]:
            return None
        total = buckets[-1][1]
        return Spread(int(total), *(_quantile(buckets, total * share) for share in (0.5, 0.95, 0.99, 1.0)))


def summary_of_metrics(text: str, source: str) -> TraceSummary:
    """The summary of a Prometheus exposition.

    Raises:
      ValueError: it holds none of the server's metrics.
    """
    samples = _Samples(text)
    if samples.empty:
        raise ValueError(f"{source} exports no metric named {PREFIX}*; give the address of a jaxserve server")
    ended = samples.by_label("request_success_total", "finished_reason")
    rejected = samples.by_label("requests_rejected_total", "reason")
    ttft, queue = samples.spread("time_to_first_token_seconds"), samples.spread("request_queue_time_seconds")
    live = int(samples.total("num_requests_running") + samples.total("num_requests_waiting"))
    return TraceSummary(
        source=source,
        num_iterations=int(samples.total("iteration_tokens_total_count")),
        offered=sum(ended.values()) + sum(rejected.values()) + live,
        ended={
            "completed": ended.get("stop", 0) + ended.get("length", 0),
            "aborted": ended.get("abort", 0),
            "expired": ended.get("expired", 0),
            "failed": ended.get("error", 0),
        },
        rejected={reason: count for reason, count in rejected.items() if count},
        preemptions=int(samples.total("num_preemptions_total")),
        ttft_s=ttft,
        queue_s=queue,
        ttft_tail_queue_share=min(queue.p95 / ttft.p95, 1.0) if ttft and queue and ttft.p95 else None,
        itl_s=samples.spread("inter_token_latency_seconds"),
        e2e_s=samples.spread("e2e_request_latency_seconds"),
        output_tokens=samples.spread("request_generation_tokens"),
        waiting=int(samples.total("num_requests_waiting")),
        kv_usage=samples.total("kv_cache_usage_perc"),
    )


def _quantile(buckets: list[tuple[float, float]], rank: float) -> float:
    """The value of `rank`, linear in its bucket; the last finite bound above that."""
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError(f"rank {rank} lies beyond the last of {buckets}")
