"""Metrics of both sides, in the engine's registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PULL_FAILURES = (
    "unreachable",  # no connection, or it was lost for good; no answer; or the server is starting
    "timeout",
    "refused",  # by the prefill server: busy, draining, an unknown adapter, its queue is full
    "layout",
    "token",
    "protocol",
)
"""Why a prompt was not computed by a prefill server that was asked."""
LOCAL_REASONS = ("short", "cached", "scores", "busy", "no_space", *PULL_FAILURES, "no_worker")
"""Why a decode server computed a prompt itself."""
REFUSALS = ("busy", "layout", "token", "protocol", "invalid", "engine", "draining", "failed")
"""Why a prefill server refused a pull; `engine`: the engine did, by its queue's bounds or for its adapter; `failed`: it
could not for an error of its own, which its log has."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class DecodeMetrics:
    """Of a decode server.

    Args:
      registry: the engine's.
      model_name: the `model_name` label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        names = list(self._labels)
        prefix = "jaxserve:kv_transfer"
        self.pulls = Counter(
            f"{prefix}_pulls", "Prompts computed by a prefill server.", names, registry=registry
        ).labels(**self._labels)
        self.tokens = Counter(f"{prefix}_tokens", "Prompt tokens whose K/V came.", names, registry=registry).labels(
            **self._labels
        )
        self.num_bytes = Counter(f"{prefix}_bytes", "Bytes of K/V that came.", names, registry=registry).labels(
            **self._labels
        )
        self.seconds = Histogram(
            f"{prefix}_seconds",
            "From the question to the last page, the prefill server's work included.",
            names,
            buckets=_SECONDS,
            registry=registry,
        ).labels(**self._labels)
        self.resumed = Counter(
            f"{prefix}_resumed", "Connections that went on where a lost one had stopped.", names, registry=registry
        ).labels(**self._labels)
        self._failures = Counter(
            f"{prefix}_failures",
            "Questions to a prefill server without success.",
            [*names, "reason"],
            registry=registry,
        )
        self._local = Counter(
            "jaxserve:local_prefills", "Prompts this server computed itself.", [*names, "reason"], registry=registry
        )
        for reason in PULL_FAILURES:
            self._failures.labels(**self._labels, reason=reason)
        for reason in LOCAL_REASONS:
            self._local.labels(**self._labels, reason=reason)

    def failed(self, reason: str) -> None:
        """A prefill server was asked in vain."""
        self._failures.labels(**self._labels, reason=reason).inc()

    def local(self, reason: str) -> None:
        """A prompt is computed here."""
        self._local.labels(**self._labels, reason=reason).inc()


class PrefillMetrics:
    """Of a prefill server."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        names = list(self._labels)
        prefix = "jaxserve:kv_export"
        self.served = Counter(
            f"{prefix}_served", "Prompts whose pages were all taken.", names, registry=registry
        ).labels(**self._labels)
        self.num_bytes = Counter(f"{prefix}_bytes", "Bytes of K/V that were sent.", names, registry=registry).labels(
            **self._labels
        )
        self.expired = Counter(
            f"{prefix}_expired", "Prompts whose pages nobody came for.", names, registry=registry
        ).labels(**self._labels)
        self.held_bytes = Gauge(
            f"{prefix}_held_bytes", "Set aside for pages that were not all taken yet.", names, registry=registry
        ).labels(**self._labels)
        self._refused = Counter(f"{prefix}_refused", "Refused pulls.", [*names, "reason"], registry=registry)
        for reason in REFUSALS:
            self._refused.labels(**self._labels, reason=reason)

    def refused(self, reason: str) -> None:
        """A pull was refused."""
        self._refused.labels(**self._labels, reason=reason).inc()
