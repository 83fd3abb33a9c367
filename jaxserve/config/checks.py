"""Checks of settings; each raises ValueError naming the setting, its value and the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence


def at_least(name: str, value: int, low: int) -> None:
    """An integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value}; it must be an integer of at least {low}")


def positive(name: str, value: float) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a number above 0")


def not_negative(name: str, value: float) -> None:
    """A finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a number of at least 0")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """One of the names in `known`."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
