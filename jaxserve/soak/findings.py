"""What a soak found: outcomes by kind, breaches of what must hold, and the pauses of the tool itself."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

MAX_BREACHES = 200
"""Breaches that are kept; further ones are counted."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Something that must not happen.

    Attributes:
      at: seconds after the beginning.
      rule: its name.
      what: was seen.
    """

    at: float
    rule: str
    what: str


@dataclass(slots=True)
class Findings:
    """Filled while a soak runs, on one event loop.

    Attributes:
      outcomes: counts by kind and outcome.
      breaches: the first of them, in order.
      num_breaches: all.
      latencies_s: of answers, by name.
      faults_allowed: a fault plan is at work, so requests may fail inside the server.
    """

    faults_allowed: bool = False
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    breaches: list[Breach] = field(default_factory=list)
    num_breaches: int = 0
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    began_at: float = field(default_factory=time.monotonic)

    def count(self, kind: str, outcome: str) -> None:
        """A client's action ended so."""
        self.outcomes[kind][outcome] += 1

    def breach(self, rule: str, what: str) -> None:
        """A rule was broken."""
        self.num_breaches += 1
        if len(self.breaches) < MAX_BREACHES:
            self.breaches.append(Breach(time.monotonic() - self.began_at, rule, what[:500]))

    def sums(self) -> Counter[str]:
        """Counts by outcome, over kinds."""
        return sum(self.outcomes.values(), Counter())


def slope_per_s(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through (second, value); 0 for fewer than two instants."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def quantile(values: list[float], percent: float) -> float:
    """Nearest-rank quantile, so a value that occurred; 0 of none."""
    ranked = sorted(values)
    return ranked[max(math.ceil(len(ranked) * percent / 100), 1) - 1] if ranked else 0.0
