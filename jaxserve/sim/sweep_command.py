"""What `simulate --workload` does with --sweep, --sweep_rates and --find_rate."""

from __future__ import annotations

from typing import Any

from absl.flags import FlagValues

from jaxserve.config import SchedulerConfig
from jaxserve.sim import console, plots
from jaxserve.sim.rate_search import NARROW, WIDE, find_rate, likely_runs, most_runs
from jaxserve.sim.settings import parse_sweep
from jaxserve.sim.sweep import Axis, Grid, Index, named, run_grid, search_grid
from jaxserve.sim.workload_command import WorkloadCommand

RATE = "rate"
"""The axis that is no scheduler flag."""


def run_sweep(command: WorkloadCommand, flags: FlagValues) -> dict[str, Any]:
    """Runs the sweep that the flags ask for, prints its table and draws its plot.

    Returns:
      `swept`, the names of what differs; `simulations`, how many were run; and `points`, see `run_grid` and
      `search_grid`. With --find_rate also `rate`, the highest found, and where settings are swept `best`, those it was
      found at.

    Raises:
      ValueError: a flag breaks a rule, or a search has no end.
    """
    grid = _grid(flags)
    # All of them first: a mistake in the last is answered before the first has run.
    configs = {index: command.config(_settings(point)) for index, point in grid.points().items()}
    if not flags.find_rate:
        return _at_given_rates(command, flags, grid, configs)
    for config in configs.values():
        if not any(each.given for each in command.objectives.by_service_class(config).values()):
            raise ValueError(
                "find_rate needs an objective; give slo_ttft_s, slo_itl_s or slo_tpot_s, or service_classes with"
                " targets"
            )
    if grid.axes:
        return _highest_rates(command, flags, grid, configs)
    return _highest_rate(command, flags, configs[()])


def _grid(flags: FlagValues) -> Grid:
    axes = [Axis(*parse_sweep(text)) for text in flags.sweep or ()]
    if flags.sweep_rates:
        axes.append(Axis(RATE, {rate: rate for rate in flags.sweep_rates}))
    return Grid(tuple(axes))


def _settings(point: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name != RATE}


def _at_given_rates(
    command: WorkloadCommand, flags: FlagValues, grid: Grid, configs: dict[Index, SchedulerConfig]
) -> dict[str, Any]:
    print(f"{len(grid)} simulations")
    values = grid.points()
    points = run_grid(grid, lambda index: command.figures(configs[index], values[index].get(RATE)))
    console.print_sweep(f"{command.workload.name}: {', '.join(grid.names)}", grid.names, points)
    if flags.plots:
        plots.draw_sweep(grid.names, points, flags.plots, flags.plot_format)
    return {"swept": grid.names, "simulations": len(points), "points": points}


def _highest_rate(command: WorkloadCommand, flags: FlagValues, config: SchedulerConfig) -> dict[str, Any]:
    """Of the settings as they are: the points are the rates tried."""
    print(_announced(1))
    found = find_rate(lambda rate: command.figures(config, rate), flags.slo_share, command.workload.rate or 1.0)
    if found.rate is None:
        raise ValueError(_met_nowhere(flags, "", min(found.tried)))
    points = [{RATE: rate, "figures": figures} for rate, figures in found.tried.items()]
    console.print_sweep(f"{command.workload.name}: {RATE}", [RATE], points)
    print(f"highest rate at which {flags.slo_share:.1%} meet the objectives: {found.rate:.4g} requests/s")
    if flags.plots:
        plots.draw_sweep([RATE], points, flags.plots, flags.plot_format)
    return {"swept": [RATE], "simulations": len(points), "points": points, "rate": found.rate}


def _highest_rates(
    command: WorkloadCommand, flags: FlagValues, grid: Grid, configs: dict[Index, SchedulerConfig]
) -> dict[str, Any]:
    """Of every combination of settings: the points are these, the best first."""
    print(_announced(len(grid)))
    points = search_grid(
        grid,
        lambda index: lambda rate: command.figures(configs[index], rate),
        flags.slo_share,
        command.workload.rate or 1.0,
    )
    rate = points[0][RATE]
    if rate is None:
        lowest = min(each[RATE] for point in points for each in point["tried"])
        raise ValueError(_met_nowhere(flags, " at any setting of the sweep", lowest))
    simulations = sum(len(point["tried"]) for point in points)
    best = {name: points[0][name] for name in grid.names}
    console.print_sweep(f"{command.workload.name}: best first", [*grid.names, RATE], points)
    equals = sum(point[RATE] == rate for point in points) - 1
    print(
        f"best of {len(points)} after {simulations} simulations: {named(best)}, up to {rate:.4g} requests/s with"
        f" {flags.slo_share:.1%} meeting the objectives" + (f"; {equals} more reach this rate" if equals else "")
    )
    if flags.plots:
        plots.draw_ranking(grid.names, points, flags.plots, flags.plot_format)
    return {"swept": grid.names, "simulations": simulations, "best": best, RATE: rate, "points": points}


def _announced(num_points: int) -> str:
    """How many simulations are to be expected."""
    likely = likely_runs(WIDE) + (num_points - 1) * likely_runs(NARROW)
    most = most_runs(WIDE) + (num_points - 1) * max(most_runs(WIDE), most_runs(NARROW))
    of = "" if num_points == 1 else f" of {num_points} settings"
    return f"searching the highest rate{of}: about {likely} simulations, at most {most}"


def _met_nowhere(flags: FlagValues, where: str, lowest: float) -> str:
    return (
        f"find_rate: {flags.slo_share:.1%} of the requests do not meet their objectives{where} even at"
        f" {lowest:.3g} requests/s; relax the objectives or slo_share"
    )
