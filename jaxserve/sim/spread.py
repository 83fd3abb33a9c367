"""Spread: a few quantiles of many values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, median and tail; quantiles are nearest-rank, so each is a value that occurred."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float


def spread_of(values: Iterable[float]) -> Spread | None:
    """The spread of `values`; None of none."""
    ranked = sorted(values)
    if not ranked:
        return None
    quantiles = (ranked[max(-(-len(ranked) * percent // 100), 1) - 1] for percent in (50, 95, 99, 100))
    return Spread(len(ranked), *quantiles)
