"""From a flag's text to its value, or to the rule that the text breaks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from absl.flags import ArgumentParser

from jaxserve.config.api_keys import ApiKey, read_api_keys
from jaxserve.config.service_class import ServiceClass, read_service_classes


class IntParser(ArgumentParser[int]):
    """An integer in [low, high]."""

    syntactic_help = "an integer"

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        self._low, self._high = low, high

    def parse(self, argument: Any) -> int:
        try:
            value = int(argument)
        except (TypeError, ValueError):
            raise ValueError("must be an integer") from None
        if self._low is not None and value < self._low:
            raise ValueError(f"must be at least {self._low}")
        if self._high is not None and value > self._high:
            raise ValueError(f"must be at most {self._high}")
        return value

    def flag_type(self) -> str:
        return "int"


class FloatParser(ArgumentParser[float]):
    """A finite number of at least `low`."""

    syntactic_help = "a number"

    def __init__(self, low: float | None = None) -> None:
        self._low = low

    def parse(self, argument: Any) -> float:
        try:
            value = float(argument)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
        if not math.isfinite(value):
            raise ValueError("must be finite")
        if self._low is not None and value < self._low:
            raise ValueError(f"must be at least {self._low:g}")
        return value

    def flag_type(self) -> str:
        return "float"


class ListParser(ArgumentParser[tuple[Any, ...]]):
    """Values separated by commas, each by `item`'s rule."""

    syntactic_help = "values separated by commas"

    def __init__(self, item: ArgumentParser[Any]) -> None:
        self._item = item

    def parse(self, argument: Any) -> tuple[Any, ...]:
        texts = argument.split(",") if isinstance(argument, str) else argument
        try:
            return tuple(self._item.parse(text.strip() if isinstance(text, str) else text) for text in texts)
        except ValueError as error:
            raise ValueError(f"must be values separated by commas, each of which {error}") from None

    def flag_type(self) -> str:
        return "list"


class ChoiceParser(ArgumentParser[str]):
    """One of a few words."""

    syntactic_help = "one of a few words"

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = tuple(choices)

    def parse(self, argument: Any) -> str:
        if argument not in self._choices:
            raise ValueError(f"must be one of {', '.join(choice or 'empty' for choice in self._choices)}")
        return str(argument)

    def flag_type(self) -> str:
        return "|".join(self._choices)


class TextParser(ArgumentParser[str]):
    """Any text."""

    syntactic_help = "text"

    def flag_type(self) -> str:
        return "text"


class RepeatedParser(TextParser):
    """Any text; the flag may be given several times, and its value is the list of them all."""


class FromFile(tuple[Any, ...]):
    """Values that a file holds.

    Attributes:
      path: the file.
    """

    path: str = ""

    @classmethod
    def of(cls, path: str, values: Sequence[Any]) -> FromFile:
        """The values of `path`."""
        held = cls(values)
        held.path = path
        return held


class ApiKeyFileParser(ArgumentParser[tuple[ApiKey, ...]]):
    """A file of API keys."""

    syntactic_help = "a file with a key a line"

    def parse(self, argument: Any) -> tuple[ApiKey, ...]:
        return argument if isinstance(argument, tuple) else FromFile.of(argument, read_api_keys(argument))

    def flag_type(self) -> str:
        return "file"


class OriginParser(ArgumentParser[str]):
    """An origin as browsers send it, or * for all."""

    syntactic_help = "an origin"

    def parse(self, argument: Any) -> str:
        text = str(argument)
        if text != "*" and not re.fullmatch(r"https?://[^/\s@,]+", text):
            raise ValueError("must be * or an origin, as https://example.org:8443")
        return text

    def flag_type(self) -> str:
        return "origin"


class HostNameParser(ArgumentParser[str]):
    """A name as Host headers have it, without a port, or * for all."""

    syntactic_help = "a host name"

    def parse(self, argument: Any) -> str:
        text = str(argument)
        if text != "*" and not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text):
            raise ValueError("must be * or a host name without a port, as models.example.org")
        return text

    def flag_type(self) -> str:
        return "host name"


class ServiceClassParser(ArgumentParser[tuple[ServiceClass, ...]]):
    """A file of service classes."""

    syntactic_help = "a JSON file"

    def parse(self, argument: Any) -> tuple[ServiceClass, ...]:
        return argument if isinstance(argument, tuple) else FromFile.of(argument, read_service_classes(argument))

    def flag_type(self) -> str:
        return "file"
