"""`python -m jaxserve.bench WHAT [flags]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from jaxserve.bench.report import MeasurementError
from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, parse_flags

MEASUREMENTS = (
    *("offline", "serve", "compare", "compare_modes", "machine", "decode_ratio", "startup", "scheduler", "simulation"),
    *("preemption", "structured", "sse", "buckets", "decode_steps", "host_work", "quality", "lora", "recovery"),
    *("overload", "connections", "outages"),
)


def main(argv: Sequence[str]) -> None:
    """Runs the measurement named by the first argument.

    Raises:
      SystemExit: non-zero on a bad argument, or when what was to be measured failed.
    """
    what = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else None
    if what is not None and what not in MEASUREMENTS:
        exit_with(f"there is no measurement {what!r}; choose {', '.join(MEASUREMENTS)}")
    flags = parse_flags("bench", [argv[0], *argv[1 if what is None else 2 :]])
    if what is None:
        exit_with(f"say first what to measure: {', '.join(MEASUREMENTS)}")
    # Imported only now: a wrong flag is answered before jax has loaded, and some measurements do without it.
    measurement = import_module(f"jaxserve.bench.{what}")
    try:
        measurement.run(flags)
    except ValueError as error:
        exit_with(str(error))
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main)
