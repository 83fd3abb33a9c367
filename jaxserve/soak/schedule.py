"""The schedule of a soak: which client does what and when, the same for the same seed.

It comes in rounds: mixed traffic as a Poisson process; then a burst of more requests than slots and queue hold, with a
storm of connections that come and go; then rest, in which the server must become idle and clean.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxserve.soak.kinds import Action, Sizes, draw, make

BURST_KINDS = ("stream", "whole", "choices", "grpc")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a soak is made of.

    Attributes:
      seconds: all rounds together, about; rests included.
      rate: actions a second of the mixed traffic.
      mixed_s: of it in a round.
      burst: requests at once.
      storm: connections at once.
    """

    seconds: float
    rate: float = 12.0
    mixed_s: float = 15.0
    burst: int = 60
    storm: int = 80


@dataclass(frozen=True, slots=True)
class Round:
    """One round; instants count from its own beginning.

    Attributes:
      actions: in order of time, the burst's last.
      storm_at: when the connections come.
    """

    actions: tuple[Action, ...]
    storm_at: float


def make_round(seed: int, index: int, first_number: int, shape: Shape, sizes: Sizes) -> Round:
    """Round `index` of the soak of a seed; it depends on no other but for the numbers of its actions."""
    rng = random.Random(f"{seed}:{index}")
    actions: list[Action] = []
    at = rng.expovariate(shape.rate)
    while at < shape.mixed_s:
        actions.append(draw(rng, at, first_number + len(actions), sizes))
        at += rng.expovariate(shape.rate)
    for _ in range(shape.burst):
        number = first_number + len(actions)
        actions.append(make(rng, rng.choice(BURST_KINDS), shape.mixed_s, number, sizes))
    return Round(tuple(actions), shape.mixed_s * rng.random())
