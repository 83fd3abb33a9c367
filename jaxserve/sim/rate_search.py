"""The search for the highest rate at which a workload meets its objectives.

Rates are powers of `1 + PRECISION`, so two searches that mean the same rate find the same number, wherever they
began. From the first rate the steps double until the objectives are met on one side and not on the other; then the
interval is halved until no power lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log, log2
from typing import Any

PRECISION = 0.02
"""Of the rate found, relative."""
_RATIO = 1.0 + PRECISION
_HIGHEST, _LOWEST = floor(log(1e7, _RATIO)), ceil(log(1e-6, _RATIO))
WIDE, NARROW = 32, 4
"""Steps to begin with, in powers: about a factor of 1.9 where nothing is known, of 1.08 near a likely rate."""

Run = Callable[[float], dict[str, Any]]
"""Figures at a rate."""


@dataclass(frozen=True, slots=True)
class FoundRate:
    """What a search found.

    Attributes:
      rate: the highest that meets the objectives, None where none does.
      tried: figures by rate, ascending.
    """

    rate: float | None
    tried: dict[float, dict[str, Any]]


def find_rate(run: Run, share: float, start: float = 1.0, step: int = WIDE) -> FoundRate:
    """The highest rate at which `share` of the requests meet their objectives.

    More load is taken to be worse. A short workload never fills the queue, however fast it comes: then
    there is no highest rate.

    Args:
      run: figures at a rate.
      share: in (0, 1].
      start: first rate tried, or near it.
      step: first step from there, in powers of `1 + PRECISION`.

    Raises:
      ValueError: the objectives are met at every rate.
    """
    tried: dict[float, dict[str, Any]] = {}

    def meets(power: int) -> bool:
        figures = tried[_RATIO**power] = run(_RATIO**power)
        return (figures["slo_share"] or 0.0) >= share

    low = high = min(max(floor(log(start, _RATIO) + 0.5), _LOWEST), _HIGHEST)
    if meets(low):
        while meets(high := min(low + step, _HIGHEST)):
            if high == _HIGHEST:
                raise ValueError(
                    f"find_rate: the objectives are met even at {_RATIO**high:.3g} requests/s;"
                    " use a workload with more requests, or stricter objectives"
                )
            low, step = high, 2 * step
    else:
        while not meets(low := max(high - step, _LOWEST)):
            if low == _LOWEST:
                return FoundRate(None, dict(sorted(tried.items())))
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return FoundRate(_RATIO**low, dict(sorted(tried.items())))


def most_runs(step: int = WIDE) -> int:
    """The most simulations a search takes: the first, doubling over the whole range, and halving the last step."""
    doublings = ceil(log2((_HIGHEST - _LOWEST) / step + 1))
    return 1 + doublings + ceil(log2(step * 2 ** (doublings - 1)))


def likely_runs(step: int = WIDE) -> int:
    """Where the rate lies within the first step or the second: the usual case."""
    return 2 + ceil(log2(2 * step))
