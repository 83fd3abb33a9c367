"""Histogram: quantiles of more values than one would keep."""

from __future__ import annotations

import math


class Histogram:
    """Positive values in bins of 1% width; each bin keeps its mean.

    A quantile is the mean of the bin it falls into: within 1% of the exact one, and exact where all values
    of a bin are equal. The mean and the largest value are exact. A value equal to the one before costs little:
    the rows of one iteration mostly have the same gap.
    """

    _LOG_WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self._bins: dict[int, list[float]] = {}  # bin -> [count, sum]
        self._newest = -1.0
        self._newest_bin: list[float] = []
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Counts a value of at least 0."""
        if value != self._newest:
            key = int(math.log(value) // self._LOG_WIDTH) if value > 0.0 else -(1 << 30)
            self._newest, self._newest_bin = value, self._bins.setdefault(key, [0, 0.0])
            if value > self.largest:
                self.largest = value
        entry = self._newest_bin
        entry[0] += 1
        entry[1] += value

    def merge(self, other: Histogram) -> None:
        """Counts what `other` counted too."""
        for key, (count, total) in other._bins.items():
            entry = self._bins.setdefault(key, [0, 0.0])
            entry[0] += count
            entry[1] += total
        self.largest = max(self.largest, other.largest)

    @property
    def count(self) -> int:
        """Of values."""
        return int(sum(count for count, _ in self._bins.values()))

    @property
    def mean(self) -> float | None:
        """None without values."""
        count = self.count
        return sum(total for _, total in self._bins.values()) / count if count else None

    def quantile(self, share: float) -> float | None:
        """The least value that `share` of the values do not exceed; None without values."""
        wanted = max(math.ceil(share * self.count), 1)
        seen = 0
        for key in sorted(self._bins):
            count, total = self._bins[key]
            seen += int(count)
            if seen >= wanted:
                return total / count
        return None
