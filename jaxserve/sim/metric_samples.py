"""MetricSamples: what a server's /metrics says, by name; two of them give what happened between."""

from __future__ import annotations

import re
from collections import defaultdict

from jaxserve.sim.spread import Spread

PREFIX = "jaxserve:"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_Labels = tuple[tuple[str, str], ...]


class MetricSamples:
    """The samples of an exposition text, by name without the prefix."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, dict[_Labels, float]] = defaultdict(dict)
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match and match["name"].startswith(PREFIX):
                labels = tuple(_LABEL.findall(match["labels"] or ""))
                self._by_name[match["name"].removeprefix(PREFIX)][labels] = float(match["value"])

    @property
    def empty(self) -> bool:
        """There is none."""
        return not self._by_name

    def since(self, earlier: MetricSamples) -> MetricSamples:
        """The differences to `earlier`: what counters and histograms gained. Gauges mean nothing in it.

        A server that was started anew in between has smaller sums; then it is all since its start.
        """
        gained = MetricSamples("")
        for name, samples in self._by_name.items():
            before = earlier._by_name.get(name, {})
            gained._by_name[name] = {labels: value - before.get(labels, 0.0) for labels, value in samples.items()}
        count = "iteration_tokens_total_count"
        return self if self.total(count) < earlier.total(count) else gained

    def total(self, name: str) -> float:
        """Sum over all labels."""
        return sum(self._by_name.get(name, {}).values())

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Sums by the value of a label."""
        sums: dict[str, int] = defaultdict(int)
        for labels, value in self._by_name.get(name, {}).items():
            sums[dict(labels).get(label, "")] += int(value)
        return dict(sums)

    def spread(self, name: str) -> Spread | None:
        """Of a histogram; None when it is empty. Its maximum is the bound of the last bucket in use."""
        counts: dict[float, float] = defaultdict(float)
        for labels, value in self._by_name.get(f"{name}_bucket", {}).items():
            counts[float(dict(labels)["le"])] += value
        buckets = sorted(counts.items())
        if not buckets or not buckets[-1][1]:
            return None
        total = buckets[-1][1]
        return Spread(int(total), *(_quantile(buckets, total * share) for share in (0.5, 0.95, 0.99, 1.0)))


def _quantile(buckets: list[tuple[float, float]], rank: float) -> float:
    """The value of `rank`, linear in its bucket; the last finite bound above that."""
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError(f"rank {rank} lies beyond the last of {buckets}")
