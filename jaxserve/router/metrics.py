"""The router's own metrics; those of the replicas are at the replicas."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "jaxserve:router_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    """Everything the router counts.

    Attributes:
      registry: holds them all.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answers by replica and status", "replica", "status")
        self.choices = self._counter("choices", "Replicas chosen, by what decided", "reason")
        self.retries = self._counter("retries", "Requests that another replica was tried for", "reason")
        self.refused = self._counter("refused", "Requests that the router itself answered with an error", "code")
        self.broken = self._counter("streams_broken", "Answers that ended in the middle, by replica", "replica")
        self.gone = self._counter("client_disconnects", "Clients that left before their answer ended")
        self.prompt_bytes = self._counter("prompt_bytes", "Bytes of prompts routed")
        self.matched_bytes = self._counter(
            "matched_bytes", "Of these, in beginnings that the chosen replica had before"
        )
        self.restarts = self._counter("replica_restarts", "Children started again", "replica")
        self.up = self._gauge("replica_up", "1: in rotation; 0.5: half open; 0: out")
        self.in_flight = self._gauge("requests_in_flight", "Requests given to the replica that have not ended")
        self.from_others = self._gauge("requests_from_others", "Requests at the replica that others gave it")
        self.blocks = self._gauge("cache_table_blocks", "Blocks of prompts remembered of the replica")
        self.first_byte = Histogram(
            _PREFIX + "time_to_first_byte_seconds",
            "From the end of a request to the first byte of its answer, retries included",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(_PREFIX + name, about, ("replica",), registry=self.registry)
