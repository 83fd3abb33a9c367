"""WorkloadCommand: the flags of `simulate --workload`, and the runs they describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from jaxserve.config import SchedulerConfig
from jaxserve.config.flags import routing_settings_from_flags
from jaxserve.scheduler import TraceWriter
from jaxserve.sim.cost_model import CostModel, LinearCost, StepFeatures, UnitCost
from jaxserve.sim.fixed_workload import load_workload
from jaxserve.sim.fleet import Fleet, fleet_figures
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.roofline import CHIPS, ModelShape, RooflineCost
from jaxserve.sim.settings import parse_sweep, scheduler_config
from jaxserve.sim.simulator import MAX_ITERATIONS, SimulationResult, Simulator
from jaxserve.sim.split import Link, Split
from jaxserve.sim.workload import Workload

_BITS = {"float32": 32, "bfloat16": 16}


class WorkloadCommand:
    """The flags, read once.

    Raises:
      ValueError: a flag or file breaks a rule.
    """

    def __init__(self, flags: FlagValues) -> None:
        self._flags = flags
        sweeps = [name for name in ("sweep_rates", "find_rate", "sweep") if flags[name].value]
        rates = [name for name in ("rate", "sweep_rates", "find_rate") if flags[name].value]
        if len(rates) > 1:
            raise ValueError(f"{rates[0]} and {rates[1]} are given; {rates[1]} sets the rate itself")
        if sweeps and flags.trace_file:
            raise ValueError(f"trace_file and {sweeps[0]} are given; a trace is of one run")
        if not 0.0 < flags.slo_share <= 1.0:
            raise ValueError(f"slo_share is {flags.slo_share}; it must be in (0, 1]")
        one_only = [name for name in ("trace_file", "plots", "prefill_engines") if flags[name].value]
        if flags.decode_engines > 1:
            one_only.append("decode_engines")
        if one_only and flags.num_replicas > 1:
            raise ValueError(
                f"{one_only[0]} and num_replicas are given; it is of one replica, leave one of the two out"
            )
        self._routing = routing_settings_from_flags(flags)
        self.objectives = Objectives(flags.slo_ttft_s, flags.slo_itl_s, flags.slo_tpot_s)
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
        """One run of one replica."""
        flags = self._flags
        if flags.prefill_engines or flags.decode_engines > 1:
            return self._run_split(workload, config)
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

    def _run_split(self, workload: Workload, config: SchedulerConfig) -> SimulationResult:
        flags = self._flags
        changes = dict(map(_setting, flags.prefill_setting or ()))
        prefill = self.config(changes) if changes else config
        traces: list[TraceWriter] = []

        def make_trace(name: str, config: SchedulerConfig) -> TraceWriter | None:
            if not flags.trace_file:
                return None
            path = Path(flags.trace_file)
            traces.append(
                TraceWriter(path.with_suffix(f".{name}{path.suffix}"), model=f"simulated {name}", config=config)
            )
            return traces[-1]

        split = Split(
            prefill,
            config,
            self.cost_model,
            Link(flags.link_bandwidth * 1e9, flags.link_latency_s, self._page_bytes(config)),
            num_prefill=flags.prefill_engines,
            num_decode=flags.decode_engines,
            min_tokens=flags.remote_prefill_min_tokens,
            max_iterations=flags.iteration_limit or MAX_ITERATIONS,
            make_trace=make_trace,
        )
        result = split.run(workload.source())
        for trace in traces:
            trace.close()
        return result

    def _page_bytes(self, config: SchedulerConfig) -> float:
        """Of a page in one group of layers, on all chips of an engine."""
        token_bytes = self._flags.kv_token_bytes
        if token_bytes is None:
            if not isinstance(self.cost_model, RooflineCost):
                raise ValueError("kv_token_bytes is not set; only the roofline knows the bytes of a token's K/V itself")
            token_bytes = self.cost_model.moved_token_bytes
        return float(token_bytes) * config.page_size / len(config.windows)

    def figures(self, config: SchedulerConfig, rate: float | None = None) -> dict[str, Any]:
        """Of one run, at another rate where one is given."""
        workload = self.workload if rate is None else self.workload.at_rate(rate)
        if self.is_fleet:
            return self._fleet_figures(workload, config)
        return figures(self.run(workload, config), self.objectives)

    @property
    def is_fleet(self) -> bool:
        """Whether several replicas are simulated."""
        return int(self._flags.num_replicas) > 1

    def _fleet_figures(self, workload: Workload, config: SchedulerConfig) -> dict[str, Any]:
        flags = self._flags
        result = Fleet(
            config,
            self.cost_model,
            workload.source(),
            num_replicas=flags.num_replicas,
            routing=self._routing,
            max_iterations=flags.iteration_limit or MAX_ITERATIONS,
        ).run()
        return fleet_figures(result, self.objectives)

    def settings(self) -> dict[str, Any]:
        """What was asked for, for the output."""
        flags = self._flags
        names = ["workload", "rate", "cost_model", "cost_file", "prefill_engines", "decode_engines"]
        if self.is_fleet:
            names += ["num_replicas", "routing_policy", "cache_threshold", "balance_abs_threshold"]
            names += ["balance_rel_threshold", "cache_table_blocks"]
        if flags.prefill_engines:
            names += ["prefill_setting", "link_bandwidth", "link_latency_s"]
            names += ["remote_prefill_min_tokens", "kv_token_bytes"]
        if flags.cost_model == "roofline":
            names += ["chip", "model_config", "tensor_parallel_size", "dtype", "weight_bits", "kv_bits"]
            names += ["compute_efficiency", "memory_efficiency", "overhead_s", "host_bandwidth", "memory_fraction"]
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


def _setting(text: str) -> tuple[str, Any]:
    """A scheduler flag and its value, of `name=value`."""
    name, values = parse_sweep(text, "prefill_setting")
    if len(values) > 1:
        raise ValueError(f"prefill_setting is {text!r}; it must have one value")
    return name, next(iter(values.values()))


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
        host_bandwidth=flags.host_bandwidth * 1e9,
        page_size=flags.page_size,
        num_groups=max(len(flags.group_windows or ()), 1),
    )
