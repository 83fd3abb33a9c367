"""Flag: one flag of a command line, and how several of one command are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from absl.flags import ArgumentParser


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
      heading: its group in `--help`.
      parser: turns text into a value or says the rule it breaks.
      help: ends without a full stop.
      default: taken from `EngineConfig` for its fields.
      commands: that take it.
    """

    name: str
    heading: str
    parser: ArgumentParser[Any]
    help: str
    default: Any
    commands: frozenset[str]


def flags_for(
    commands: str | frozenset[str], heading: str, *flags: tuple[str, ArgumentParser[Any], Any, str]
) -> list[Flag]:
    """Flags under a heading of one command, or of several, each as name, parser, default and help."""
    takers = frozenset({commands}) if isinstance(commands, str) else commands
    return [Flag(name, heading, parser, text, default, takers) for name, parser, default, text in flags]
