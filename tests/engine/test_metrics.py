"""Engine metrics: what is observed for several tokens at once counts as if it were observed one by one."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from jaxserve.engine.metrics import EngineMetrics


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.01, 0.025, 0.5, 79.0, 80.0, 1e6])
def test_gaps_of_several_tokens_count_one_by_one(seconds):
    metrics = EngineMetrics("m")
    metrics.gaps(seconds, 3)
    (family,) = (each for each in metrics.registry.collect() if each.name == "jaxserve:inter_token_latency_seconds")
    found = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    registry = CollectorRegistry()
    bounds = [float(bound) for bound in found if bound != "+Inf"]
    plain = Histogram("plain", "one by one", buckets=bounds, registry=registry)
    for _ in range(3):
        plain.observe(seconds)
    (wanted,) = registry.collect()
    assert found == {s.labels["le"]: s.value for s in wanted.samples if s.name.endswith("_bucket")}
    assert [s.value for s in family.samples if s.name.endswith(("_count", "_sum"))] == [
        s.value for s in wanted.samples if s.name.endswith(("_count", "_sum"))
    ]
