"""Lengths: distributions of token counts, drawn in blocks from a numpy Generator.

constant     value                        always `value`; a bare number means this
uniform      low, high                    integers from low to high, both included
exponential  mean, max, min (1)           rounded, then clipped into [min, max]
lognormal    median, sigma, max, min (1)  exp of a normal with mean log(median) and deviation sigma; rounded,
                                          clipped
list         values                       one of the values, all equally likely
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.sim.json_fields import MAX_TOKENS, JsonFields

KINDS = ("constant", "uniform", "exponential", "lognormal", "list")
_BLOCK = 1024

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts in [1, longest]."""

    longest: int
    draw: Draw

    def stream(self, rng: np.random.Generator) -> Iterator[int]:
        """Endless."""
        while True:
            yield from self.draw(rng, _BLOCK).tolist()


def parse_lengths(parent: JsonFields, name: str, default: Any = None) -> Lengths:
    """Reads the field `name` of `parent`; `default` where it is missing.

    Raises:
      ValueError: naming the field and the rule it breaks.
    """
    value = parent.any(name) if default is None else parent.any(name, default)
    if isinstance(value, Lengths):
        return value
    if not isinstance(value, dict):
        return _constant(parent.integer(name, 1, most=MAX_TOKENS))
    fields = parent.object(name)
    kind = fields.choice("kind", KINDS)
    lengths = _PARSERS[kind](fields)
    fields.close()
    return lengths


def _constant(value: int) -> Lengths:
    return Lengths(value, lambda rng, count: np.full(count, value, np.int64))


def _uniform(fields: JsonFields) -> Lengths:
    low = fields.integer("low", 1)
    high = fields.integer("high", low, most=MAX_TOKENS)
    return Lengths(high, lambda rng, count: rng.integers(low, high, count, endpoint=True))


def _exponential(fields: JsonFields) -> Lengths:
    mean = fields.number("mean", above=0.0)
    return _clipped(fields, lambda rng, count: rng.exponential(mean, count))


def _lognormal(fields: JsonFields) -> Lengths:
    mean, sigma = np.log(fields.number("median", above=0.0)), fields.number("sigma", low=0.0)
    return _clipped(fields, lambda rng, count: rng.lognormal(mean, sigma, count))


def _clipped(fields: JsonFields, draw: Callable[[np.random.Generator, int], npt.NDArray[np.float64]]) -> Lengths:
    low = fields.integer("min", 1, 1)
    high = fields.integer("max", low, most=MAX_TOKENS)
    return Lengths(high, lambda rng, count: np.clip(np.rint(draw(rng, count)), low, high).astype(np.int64))


def _list(fields: JsonFields) -> Lengths:
    values = fields.items("values")
    if not values:
        raise ValueError(f"{fields.name_of('values')} is empty; it must hold at least one length")
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
            name = fields.name_of(f"values[{index}]")
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1 and at most {MAX_TOKENS}")
    table = np.asarray(values, np.int64)
    return Lengths(int(table.max()), lambda rng, count: table[rng.integers(0, len(table), count)])


_PARSERS: dict[str, Callable[[JsonFields], Lengths]] = {
    "constant": lambda fields: _constant(fields.integer("value", 1, most=MAX_TOKENS)),
    "uniform": _uniform,
    "exponential": _exponential,
    "lognormal": _lognormal,
    "list": _list,
}
