"""A measurement's figures as a table on the terminal and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.bench.host import device_name, machine


class MeasurementError(Exception):
    """What was to be measured did not do its part, as a server that does not start."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
      key: of the figure in a result; `a.b`: b in the dict a.
      heading: with the unit.
      format: of the value, as for `format`.
    """

    key: str
    heading: str
    format: str = ""


def report(
    what: str,
    settings: dict[str, Any],
    results: Sequence[dict[str, Any]],
    columns: Sequence[Column],
    output: str | None,
    *,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Prints `results`, and writes them to `output` with what they were measured on.

    Args:
      what: the measurement's name.
      settings: what was asked for.
      results: one dict per row.
      columns: what the table shows of a result.
      output: file, or None.
      more: members of the document beside the results.
    """
    print_table(what, results, columns)
    if output:
        document = {"what": what, "machine": machine(), "settings": settings, **(more or {})}
        document["results"] = list(results)
        Path(output).write_text(json.dumps(document, indent=2) + "\n")


def print_table(title: str, results: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    """Prints one row per result; the device stands in the title."""
    table = Table(title=f"{title} ({device_name()})")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for result in results:
        table.add_row(*(_shown(result, column) for column in columns))
    # Wide enough for every column also where there is no terminal to ask.
    Console(width=max(Console().width, 160)).print(table)


def _shown(result: Mapping[str, Any], column: Column) -> str:
    value: Any = result
    for key in column.key.split("."):
        value = value[key]
    return "-" if value is None else format(value, column.format)
