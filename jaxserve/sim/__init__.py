"""Simulation of the serving scheduler, replay of its traces and their diagnosis. No jax.

Start with `simulator.py`; scenarios and workloads are what it runs, cost models its clock. `replayer.py`,
`perfetto.py` and `diagnoses.py` work on traces.
"""

from jaxserve.sim.cost_model import CostModel, LinearCost, StepFeatures, UnitCost, features_of
from jaxserve.sim.fixed_workload import load_workload
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.roofline import CHIPS, Chip, ModelShape, RooflineCost
from jaxserve.sim.scenario import Scenario, load_scenario, run_scenario
from jaxserve.sim.simulator import SimulationResult, Simulator
from jaxserve.sim.source import Arrival, Source, TimedSource
from jaxserve.sim.workload import Workload, parse_workload

__all__ = [
    "CHIPS",
    "Arrival",
    "Chip",
    "CostModel",
    "LinearCost",
    "ModelShape",
    "Objectives",
    "RooflineCost",
    "Scenario",
    "SimulationResult",
    "Simulator",
    "Source",
    "StepFeatures",
    "TimedSource",
    "UnitCost",
    "Workload",
    "features_of",
    "figures",
    "load_scenario",
    "load_workload",
    "parse_workload",
    "run_scenario",
]
