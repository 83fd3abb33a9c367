"""`python -m jaxserve.simulate`: the serving scheduler under a simulated clock.

    --scenario=FILE --output=FILE      a small case, iteration by iteration, compared with its expected trace
    --workload=FILE [--cost_model=...] a load on a continuous clock: latencies, throughput, sweeps, plots

No jax: everything here runs where the scheduler runs. docs/simulation.md has the file formats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, flags_of, parse_flags
from jaxserve.sim import scenario as scenarios
from jaxserve.sim.settings import SETTINGS, given_settings

_EXIT_DIFFERENT = 1
_OF_SCENARIOS = {"scenario", "output", "iteration_limit", "log_level", *SETTINGS}


def main(argv: Sequence[str]) -> None:
    """Runs what the flags ask for.

    Raises:
      SystemExit: 1 when a scenario's result is not the expected one, 2 on a mistake in flags or files.
    """
    flags = parse_flags("simulate", argv)
    if bool(flags.scenario) == bool(flags.workload):
        exit_with("give either --scenario=FILE or --workload=FILE")
    try:
        status = _run_scenario(flags) if flags.scenario else _run_workload(flags)
    except ValueError as error:
        exit_with(str(error))
    except BrokenPipeError:
        raise  # of the output, not of a file
    except OSError as error:
        exit_with(f"{error.filename}: {error.strerror}")
    raise SystemExit(status)


def _run_scenario(flags: FlagValues) -> int:
    for flag in flags_of("simulate"):
        if flag.name not in _OF_SCENARIOS and flags[flag.name].present:
            raise ValueError(f"{flag.name} is given with scenario; it is for a workload, leave it out")
    scenario = scenarios.load_scenario(flags.scenario, given_settings(flags))
    output = scenarios.run_scenario(scenario, flags.iteration_limit or scenarios.DEFAULT_LIMIT)
    _write(flags.output, output)
    if scenario.expected is None:
        print(f"{scenario.name}: {output['termination']}; nothing is expected", file=sys.stderr)
        return 0
    difference = scenarios.difference(scenario.expected, output)
    print(
        f"{scenario.name}: {'as expected' if difference is None else f'not as expected: {difference}'}", file=sys.stderr
    )
    return 0 if difference is None else _EXIT_DIFFERENT


def _run_workload(flags: FlagValues) -> int:
    # Only a workload prints tables: a scenario starts without rich.
    from jaxserve.sim.command import run_workload

    document = run_workload(flags)
    if flags.output is not None:
        _write(flags.output, document)
    return 0


def _write(path: str | None, document: Any) -> None:
    """To a file, or to stdout without one."""
    # Service classes are dataclasses among the settings.
    text = json.dumps(document, indent=1, default=asdict) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


if __name__ == "__main__":
    run_command(main)
