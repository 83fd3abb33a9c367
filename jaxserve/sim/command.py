"""What `simulate --workload` does with its flags: one run, a sweep, or the search for a rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from absl.flags import FlagValues

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import TraceWriter
from jaxserve.sim import console
from jaxserve.sim.cost_model import CostModel, LinearCost, StepFeatures, UnitCost
from jaxserve.sim.fixed_workload import load_workload
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.roofline import CHIPS, ModelShape, RooflineCost
from jaxserve.sim.settings import parse_sweep, scheduler_config
from jaxserve.sim.simulator import MAX_ITERATIONS, SimulationResult, Simulator
from jaxserve.sim.sweep import find_rate, sweep
from jaxserve.sim.workload import Workload

_BITS = {"float32": 32, "bfloat16": 16}


class WorkloadCommand:
    """The flags, read once.

    Raises:
      ValueError: a flag or file breaks a rule.
    """

    def __init__(self, flags: FlagValues) -> None:
        self._flags = flags
        asked = [name for name in ("sweep_rates", "find_rate", "sweep") if flags[name].value]
        if len(asked) > 1:
            raise ValueError(f"{asked[0]} and {asked[1]} are given; a run can only do one of them")
        if flags.rate is not None and asked and asked[0] != "sweep":
            raise ValueError(f"rate and {asked[0]} are given; {asked[0]} sets the rate itself")
        if asked and flags.trace_file:
            raise ValueError(f"trace_file and {asked[0]} are given; a trace is of one run")
        if not 0.0 < flags.slo_share <= 1.0:
            raise ValueError(f"slo_share is {flags.slo_share}; it must be in (0, 1]")
        self.objectives = Objectives(flags.slo_ttft_s, flags.slo_itl_s, flags.slo_tpot_s)
        if flags.find_rate and not self.objectives.given:
            raise ValueError("find_rate needs an objective; give slo_ttft_s, slo_itl_s or slo_tpot_s")
        self.workload = load_workload(flags.workload)
        if flags.rate is not None:
            self.workload = self.workload.at_rate(flags.rate)
        self.cost_model = _cost_model(flags)

    def config(self, changes: Mapping[str, Any] | None = None) -> SchedulerConfig:
        """The scheduler's settings; with a roofline the chip's memory decides the number of pages."""
        flags, cost_model = self._flags, self.cost_model
        num_pages = None
        if isinstance(cost_model, RooflineCost):
            page_size = (changes or {}).get("page_size", flags.page_size)
            num_pages = cost_model.num_pages(page_size, flags.memory_fraction)
        return scheduler_config(flags, max_model_len=self.workload.longest, num_pages=num_pages, changes=changes)

    def run(self, workload: Workload, config: SchedulerConfig) -> SimulationResult:
        """One run."""
        flags = self._flags
        trace = TraceWriter(flags.trace_file, model="simulated", config=config) if flags.trace_file else None
        simulator = Simulator(
            config,
            self.cost_model,
            workload.source(),
            trace=trace,
            max_iterations=flags.iteration_limit or MAX_ITERATIONS,
        )
        result = simulator.run()
        if trace:
            trace.close()
        return result

    def settings(self) -> dict[str, Any]:
        """What was asked for, for the output."""
        flags = self._flags
        names = ["workload", "rate", "cost_model", "cost_file"]
        if flags.cost_model == "roofline":
            names += ["chip", "model_config", "tensor_parallel_size", "dtype", "weight_bits", "kv_bits"]
            names += ["compute_efficiency", "memory_efficiency", "overhead_s", "memory_fraction"]
        return {name: flags[name].value for name in names}

    def explanation(self, config: SchedulerConfig) -> list[str]:
        """The cost model's arithmetic for two plain iterations."""
        context = min(1024, config.max_model_len)
        rows = config.max_num_seqs
        chunk = min(config.prefill_chunk, config.max_model_len)
        decode = StepFeatures(decode_rows=rows, decode_context=rows * context, emitted=rows)
        prefill = StepFeatures(
            prefill_tokens=chunk, prefill_attention=chunk * (chunk + 1) // 2, prefill_context=chunk, emitted=1
        )
        return [
            f"-- decode: {rows} rows, {context} tokens of context each",
            *self.cost_model.explain(decode),
            f"-- prefill: the first {chunk} tokens of a prompt",
            *self.cost_model.explain(prefill),
        ]


def run_workload(flags: FlagValues) -> dict[str, Any]:
    """Runs, prints tables, draws plots.

    Returns:
      The output document, JSON-able: `settings`, `scheduler`, `cost` (lines), and `figures` of one run, or
      `points` of a sweep with `swept` naming what differs, and `rate` where one was searched for.

    Raises:
      ValueError: a flag or file breaks a rule.
    """
    command = WorkloadCommand(flags)
    workload, objectives = command.workload, command.objectives
    if flags.plots:
        from jaxserve.sim import plots

        plots.require_matplotlib()
    config = command.config()
    document: dict[str, Any] = {
        "settings": command.settings(),
        "scheduler": asdict(config),
        "objectives": asdict(objectives) | {"share": flags.slo_share},
        "cost": command.explanation(config),
    }
    if flags.cost_model != "unit":
        print("\n".join(document["cost"]) + "\n")

    def at_rate(rate: float) -> dict[str, Any]:
        return figures(command.run(workload.at_rate(rate), config), objectives)

    if flags.sweep or flags.sweep_rates or flags.find_rate:
        if flags.sweep:
            name, values = parse_sweep(flags.sweep)
            # All of them first: a mistake in the last is answered before the first has run.
            configs = {text: command.config({name: value}) for text, value in values.items()}
            points = sweep(name, configs, lambda text: figures(command.run(workload, configs[text]), objectives))
        elif flags.sweep_rates:
            name = "rate"
            points = sweep(name, flags.sweep_rates, at_rate)
        else:
            name = "rate"
            document["rate"], points = find_rate(at_rate, flags.slo_share, workload.rate or 1.0)
        document |= {"swept": name, "points": points}
        console.print_sweep(f"{workload.name}: {name}", name, points)
        if flags.find_rate:
            print(f"highest rate at which {flags.slo_share:.1%} meet the objectives: {document['rate']:.4g} requests/s")
        if flags.plots:
            plots.draw_sweep(name, points, flags.plots, flags.plot_format)
        return document
    result = command.run(workload, config)
    document["figures"] = figures(result, objectives)
    console.print_run(workload.name, document["figures"])
    if flags.plots:
        plots.draw_run(result, flags.plots, flags.plot_format)
    return document


def _cost_model(flags: FlagValues) -> CostModel:
    if flags.cost_model == "linear":
        if flags.cost_file is None:
            raise ValueError("cost_model is linear; give its coefficients with cost_file (tools/fit_cost_model)")
        return LinearCost.from_file(flags.cost_file)
    if flags.cost_file is not None:
        raise ValueError(f"cost_file is given and cost_model is {flags.cost_model}; only linear reads it")
    if flags.cost_model == "unit":
        return UnitCost()
    if flags.model_config is None:
        raise ValueError(
            "cost_model is roofline; say of which model with model_config, as configs/models/llama-3.1-8b.json"
        )
    return RooflineCost(
        CHIPS[flags.chip],
        ModelShape.from_file(flags.model_config),
        num_chips=flags.tensor_parallel_size,
        weight_bits=flags.weight_bits or _BITS[flags.dtype],
        kv_bits=flags.kv_bits or _BITS[flags.dtype],
        compute_efficiency=flags.compute_efficiency,
        memory_efficiency=flags.memory_efficiency,
        overhead_s=flags.overhead_s,
    )
