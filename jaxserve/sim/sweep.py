"""Sweeps: a workload at several rates or settings, and the highest rate that meets the objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

HIGHEST_RATE, LOWEST_RATE = 1e7, 1e-6
PRECISION = 0.02
"""Of the rate found, relative."""

Run = Callable[[Any], dict[str, Any]]
"""Figures at one value."""


def sweep(name: str, values: Iterable[Any], run: Run) -> list[dict[str, Any]]:
    """One point, `{name: value, "figures": ...}`, per value."""
    return [{name: value, "figures": run(value)} for value in values]


def find_rate(run: Run, share: float, start: float = 1.0) -> tuple[float, list[dict[str, Any]]]:
    """The highest rate at which `share` of the requests meet their objectives, by doubling and bisection.

    More load is taken to be worse. A short workload never fills the queue, however fast it comes: then
    there is no highest rate.

    Args:
      run: figures at a rate.
      share: in (0, 1].
      start: first rate tried.

    Returns:
      The rate, at most `PRECISION` below one that failed; and all points tried, by rate.

    Raises:
      ValueError: every rate fails, or none does.
    """
    points: dict[float, dict[str, Any]] = {}

    def meets(rate: float) -> bool:
        points[rate] = run(rate)
        return (points[rate]["slo_share"] or 0.0) >= share

    low, high = start, start
    if meets(start):
        while meets(high := high * 2.0):
            low = high
            if high > HIGHEST_RATE:
                raise ValueError(
                    f"find_rate: the objectives are met even at {high:.3g} requests/s;"
                    " use a workload with more requests, or stricter objectives"
                )
    else:
        while not meets(low := low / 2.0):
            high = low
            if low < LOWEST_RATE:
                raise ValueError(
                    f"find_rate: {share:.1%} of the requests do not meet their objectives even at"
                    f" {low:.3g} requests/s; relax the objectives or slo_share"
                )
    while high / low > 1.0 + PRECISION:
        middle = (low * high) ** 0.5
        if meets(middle):
            low = middle
        else:
            high = middle
    return low, [{"rate": rate, "figures": points[rate]} for rate in sorted(points)]
