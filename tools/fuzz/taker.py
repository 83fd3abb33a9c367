"""What a fuzzer's bytes are made into: damaged copies of valid documents, and choices."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "a b",
    "\x00",
    "\ud83d",
    "é😀",
    "x" * 300,
    "1",
    "{}",
    "[" * 50,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"": 0},
    {"x": {"x": []}},
)
"""Values where others were expected."""
_NAMES = ("x", "", "id", "type", "name", "__class__", "\ud800", "0")


class Taker:
    """Takes numbers and bytes from `data`; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not taken yet."""
        return max(len(self._data) - self._at, 0)

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        size = max((bound - 1).bit_length() + 7 >> 3, 1)
        return int.from_bytes(self.some(size), "little") % bound

    def some(self, count: int) -> bytes:
        """So many bytes, fewer at the end."""
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def rest(self) -> bytes:
        """All that is left."""
        return self.some(self.left)

    def of[T](self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.below(len(choices))]


def document(taker: Taker, seeds: Sequence[Any], most_edits: int = 4) -> Any:
    """A copy of one of `seeds` in which some places hold other things."""
    # One below another: an edit of the root replaces it.
    holder = [copy.deepcopy(taker.of(seeds))]
    for _ in range(taker.below(most_edits + 1)):
        _edit(taker, holder)
    return holder[0]


def text(value: Any) -> bytes:
    """A document as JSON; NaN, infinities and surrogates as Python writes them."""
    return json.dumps(value).encode()


def json_text(data: bytes, seeds: Sequence[Any]) -> bytes:
    """Either `data` itself, without its first byte, or a damaged copy of a seed."""
    taker = Taker(data)
    if taker.below(4) == 0:
        return taker.rest()
    whole = text(document(taker, seeds))
    match taker.below(16):
        case 0 | 1:  # and then of its bytes
            return damaged(taker, whole)
        case 2:
            depth = taker.of((100, 1000, 1025, 20_000))
            return whole.replace(taker.of((b"{", b"1", b'"')), b"[" * depth, 1) + b"]" * depth
    return whole


def damaged(taker: Taker, data: bytes, most_edits: int = 6) -> bytes:
    """A copy of `data` with some bytes overwritten, and perhaps cut short or made longer."""
    changed = bytearray(data)
    for _ in range(taker.below(most_edits + 1)):
        at = taker.below(max(len(changed), 1))
        width = taker.of((1, 1, 2, 4, 8, 8))
        number = taker.of((0, 1, 2, 3, 8, 9, 2**7, 2**31, 2**32 - 1, 2**63, 2**64 - 1, None))
        given = taker.some(width) if number is None else (number % 2 ** (8 * width)).to_bytes(width, "little")
        changed[at : at + len(given)] = given
    match taker.below(8):
        case 0:
            del changed[taker.below(max(len(changed), 1)) :]
        case 1:
            changed += taker.rest()
    return bytes(changed)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a container."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def _edit(taker: Taker, holder: list[Any]) -> None:
    places = _places(holder)
    if not places:
        return
    container, key = taker.of(places)
    match taker.below(8):
        case 0 | 1 | 2 | 3:
            container[key] = copy.deepcopy(taker.of(ODD))
        case 4 if container is not holder:
            del container[key]
        case 5:
            other, other_key = taker.of(places)
            container[key] = copy.deepcopy(other[other_key])
        case 6:
            container[key] = [container[key]]
        case _:
            if isinstance(container, dict):
                container[taker.of(_NAMES)] = copy.deepcopy(taker.of(ODD))
            elif container is not holder:
                container.append(copy.deepcopy(taker.of(ODD)))
