"""Sweeps: a workload under every combination of some settings.

A sweep has axes, each a setting or the rate with the values to try; its points are their grid, in order, the last
axis fastest. `run_grid` takes the figures of each. `search_grid` finds the highest rate of each that meets the
objectives, and ranks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from jaxserve.sim.rate_search import NARROW, WIDE, FoundRate, Run, find_rate

MOST_POINTS = 1000
"""Of a sweep."""

Index = tuple[int, ...]
"""Of a point: one number per axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What a sweep varies.

    Attributes:
      name: of a scheduler flag, or "rate".
      values: what is tried, by how it is called in the output.
    """

    name: str
    values: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of the values of some axes.

    Raises:
      ValueError: an axis is there twice, or there are more than `MOST_POINTS` points.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"sweep has {name} twice; name each flag once, with all its values")
        if len(self) > MOST_POINTS:
            sizes = " x ".join(f"{len(axis.values)} {axis.name}" for axis in self.axes)
            raise ValueError(f"sweep has {len(self)} points ({sizes}); the limit is {MOST_POINTS}")

    def __len__(self) -> int:
        return prod(len(axis.values) for axis in self.axes)

    @property
    def names(self) -> list[str]:
        """Of the axes."""
        return [axis.name for axis in self.axes]

    def points(self) -> dict[Index, dict[str, Any]]:
        """The values of every point by the axes' names."""
        choices = product(*(enumerate(axis.values.values()) for axis in self.axes))
        return {
            tuple(index for index, _ in chosen): dict(zip(self.names, (value for _, value in chosen), strict=True))
            for chosen in choices
        }

    def labels(self, index: Index) -> dict[str, Any]:
        """What the values of a point are called, by the axes' names."""
        return {axis.name: list(axis.values)[which] for axis, which in zip(self.axes, index, strict=True)}


def run_grid(grid: Grid, run: Callable[[Index], dict[str, Any]]) -> list[dict[str, Any]]:
    """A run per point: its labels and `figures`."""
    return [grid.labels(index) | {"figures": run(index)} for index in grid.points()]


def search_grid(grid: Grid, run_of: Callable[[Index], Run], share: float, start: float = 1.0) -> list[dict[str, Any]]:
    """The highest rate of every point, best point first.

    A search begins at the rate found at the neighbour before, one step back along an axis: it is seldom far.

    Args:
      run_of: figures at a rate, of a point.
      share: of the requests that must meet their objectives, in (0, 1].
      start: rate at which the first search begins.

    Returns:
      Per point its labels; `rate`, None where no rate meets the objectives; `figures` at that rate, or at the lowest
      tried; and `tried`, the rates simulated with the share that met the objectives. The highest rate comes first;
      of equal ones that with the larger share, then the first in the grid.

    Raises:
      ValueError: the objectives are met at every rate, at some point.
    """
    found: dict[Index, FoundRate] = {}
    for index in grid.points():
        neighbour = found.get(_before(index))
        begin, step = (neighbour.rate, NARROW) if neighbour and neighbour.rate else (start, WIDE)
        try:
            found[index] = find_rate(run_of(index), share, begin, step)
        except ValueError as error:
            raise ValueError(f"{named(grid.labels(index))}: {error}") from None
    points = [grid.labels(index) | _entry(each) for index, each in found.items()]
    return sorted(points, key=lambda point: (-(point["rate"] or 0.0), -(point["figures"]["slo_share"] or 0.0)))


def named(labels: Mapping[str, Any]) -> str:
    """A point on one line, as `prefill_chunk=256 max_num_seqs=8`."""
    return " ".join(f"{name}={value}" for name, value in labels.items())


def _before(index: Index) -> Index:
    """The point one step back along the last axis that has one; of the first point itself."""
    for axis in reversed(range(len(index))):
        if index[axis]:
            return (*index[:axis], index[axis] - 1, *index[axis + 1 :])
    return index


def _entry(found: FoundRate) -> dict[str, Any]:
    shown = found.tried[found.rate] if found.rate else next(iter(found.tried.values()))
    tried = [{"rate": rate, "slo_share": figures["slo_share"]} for rate, figures in found.tried.items()]
    return {"rate": found.rate, "figures": shown, "tried": tried}
