"""/metrics: the engine's registry in the format the scraper asks for, if wanted under vLLM's names too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX, COMPAT_PREFIX = "jaxserve:", "vllm:"


class CompatCollector(Collector):
    """Every metric of `registry`, then those named `jaxserve:` again as `vllm:`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """The metrics."""
        metrics = list(self._registry.collect())
        yield from metrics
        yield from _renamed(metrics)


class _Together(Collector):
    """What several give, in their order."""

    def __init__(self, collectors: Iterable[Collector | CollectorRegistry]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            yield from collector.collect()


def _renamed(metrics: list[Metric]) -> Iterator[Metric]:
    for metric in metrics:
        if not metric.name.startswith(PREFIX):
            continue
        copy = Metric(_compat(metric.name), metric.documentation, metric.type, metric.unit)
        copy.samples = [sample._replace(name=_compat(sample.name)) for sample in metric.samples]
        yield copy


def _compat(name: str) -> str:
    return COMPAT_PREFIX + name.removeprefix(PREFIX)


def render_metrics(
    registry: CollectorRegistry, accept: str, compat: bool, process: Collector | None = None
) -> tuple[bytes, str]:
    """The exposition text and its content type.

    Args:
      accept: the scraper's Accept header.
      compat: also under `vllm:`.
      process: gives metrics beside those of the registry.
    """
    encoder, content_type = choose_encoder(accept)
    if process is not None:
        registry = _registry_of(_Together((registry, process)))
    if compat:
        registry = _registry_of(CompatCollector(registry))
    return encoder(registry), content_type


def _registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
