"""What `simulate --workload` does: one run, or a sweep."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from absl.flags import FlagValues

from jaxserve.sim import console, plots
from jaxserve.sim.report import figures
from jaxserve.sim.sweep_command import run_sweep
from jaxserve.sim.workload_command import WorkloadCommand


def run_workload(flags: FlagValues) -> dict[str, Any]:
    """Runs, prints tables, draws plots.

    Returns:
      The output document, JSON-able: `settings`, `scheduler`, `objectives`, `cost` (lines), and `figures` of one run
      or what `sweep_command` adds.

    Raises:
      ValueError: a flag or file breaks a rule.
    """
    command = WorkloadCommand(flags)
    if flags.plots:
        plots.require_matplotlib()
    config = command.config()
    document: dict[str, Any] = {
        "settings": command.settings(),
        "scheduler": asdict(config),
        "objectives": asdict(command.objectives) | {"share": flags.slo_share},
        "cost": command.explanation(config),
    }
    if flags.cost_model != "unit":
        print("\n".join(document["cost"]) + "\n")
    if flags.sweep or flags.sweep_rates or flags.find_rate:
        return document | run_sweep(command, flags)
    if command.is_fleet:
        document["figures"] = command.figures(config)
        console.print_run(command.workload.name, document["figures"])
        console.print_fleet(document["figures"])
        return document
    result = command.run(command.workload, config)
    document["figures"] = figures(result, command.objectives)
    console.print_run(command.workload.name, document["figures"])
    if flags.plots:
        plots.draw_run(result, flags.plots, flags.plot_format)
    return document
