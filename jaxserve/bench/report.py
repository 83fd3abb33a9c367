"""A measurement's figures as a table on the terminal and as a JSON file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import jaxserve


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
      key: of the figure in a result.
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
) -> None:
    """Prints `results`, and writes them to `output` with what they were measured on.

    Args:
      what: the measurement's name.
      settings: what was asked for.
      results: one dict per row.
      columns: what the table shows of a result.
      output: file, or None.
    """
    table = Table(title=f"{what} ({device_name()})")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for result in results:
        table.add_row(*(format(result[column.key], column.format) for column in columns))
    # Wide enough for every column also where there is no terminal to ask.
    Console(width=max(Console().width, 120)).print(table)
    if output:
        document = {"what": what, "machine": machine(), "settings": settings, "results": list(results)}
        Path(output).write_text(json.dumps(document, indent=2) + "\n")


def device_name() -> str:
    """The kind of the default device, with the count of cores where that says more."""
    jax = _jax()
    if jax is None or jax.default_backend() == "cpu":
        return f"cpu, {os.cpu_count()} cores"
    return str(jax.devices()[0].device_kind)


def machine() -> dict[str, Any]:
    """What the figures were measured on.

    Nothing of devices is there for a measurement that did not load jax. `load_average` is of the last 1, 5 and 15
    minutes at the end, the measurement's own share included: far above the number of cores, something else ran
    beside it.
    """
    jax = _jax()
    devices = {}
    if jax is not None:
        devices = {
            "device": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "num_devices": jax.device_count(),
            "jax": version("jax"),
        }
    return devices | {
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "jaxserve": jaxserve.__version__,
    }


def _jax() -> Any:
    """jax where the measurement loaded it, else None: it need not be loaded to say that it was not used."""
    return sys.modules.get("jax")
