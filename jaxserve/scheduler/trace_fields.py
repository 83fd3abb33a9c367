"""TraceFields: the values of one JSON object of a trace, each by its rule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn


class TraceFields:
    """Each method returns the value of a key, or raises a ValueError that names place, key, rule and value.

    Args:
      where: names the object in messages.
      line: its line in the file, from 1.
      data: as parsed.
    """

    def __init__(self, where: str, line: int, data: Any) -> None:
        self.where, self.line = where, line
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {_shown(data)}; it must be an object; the file is damaged, record it again")
        self.data: dict[str, Any] = data

    def wrong(self, key: str, rule: str) -> NoReturn:
        """Raises for the value of `key`."""
        seen = f"is {_shown(self.data[key])}" if key in self.data else "is missing"
        raise ValueError(f"{self.where}: {key} {seen}; it must be {rule}; the file is damaged, record it again")

    def _take(self, key: str, fits: Callable[[Any], bool], rule: str) -> Any:
        if key not in self.data or not fits(self.data[key]):
            self.wrong(key, rule)
        return self.data[key]

    def integer(self, key: str, low: int | None = None) -> int:
        rule = "an integer" if low is None else f"an integer of at least {low}"
        value: int = self._take(key, lambda v: _is_int(v) and (low is None or v >= low), rule)
        return value

    def instant(self, key: str) -> float:
        value: float = self._take(key, _is_number, "a number of seconds")
        return value

    def instant_or_null(self, key: str) -> float | None:
        value: float | None = self._take(key, lambda v: v is None or _is_number(v), "a number of seconds or null")
        return value

    def text(self, key: str) -> str:
        value: str = self._take(key, lambda v: isinstance(v, str), "a text")
        return value

    def ids(self, key: str) -> tuple[str, ...]:
        return tuple(self._take(key, lambda v: _is_list(v, lambda i: isinstance(i, str)), "a list of request ids"))

    def instants(self, key: str) -> tuple[float, ...]:
        return tuple(self._take(key, lambda v: _is_list(v, _is_number), "a list of instants"))

    def chunks(self, key: str) -> tuple[tuple[str, int], ...]:
        pairs = self._take(key, lambda v: _is_list(v, _is_chunk), "a list of [request id, tokens] pairs")
        return tuple((request_id, tokens) for request_id, tokens in pairs)

    def flag(self, key: str) -> bool:
        value: bool = self._take(key, lambda v: isinstance(v, bool), "true or false")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        return tuple(self._take(key, _is_numbers, "a list of page numbers"))

    def named(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        pairs = self._take("named", lambda v: _is_list(v, _is_naming), "a list of [request id, page numbers] pairs")
        return tuple((request_id, tuple(numbers)) for request_id, numbers in pairs)

    def step(self) -> tuple[int, int]:
        rule = "a pair of counts, [plans made, plans updated]"
        made, updated = self._take("step", lambda v: _is_list(v, _is_int) and len(v) == 2, rule)
        return made, updated

    def events(self) -> list[TraceFields]:
        listed = self._take("events", lambda v: isinstance(v, list), "a list of events")
        return [TraceFields(f"{self.where} event {index}", self.line, data) for index, data in enumerate(listed)]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(item) for item in value)


def _is_chunk(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_int(value[1])


def _is_numbers(value: Any) -> bool:
    return _is_list(value, _is_int)


def _is_naming(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_numbers(value[1])
