"""Faults on purpose, for tests: named places in the code where a fault plan makes something go wrong."""

from jaxserve.faults.failpoint import failpoint, failpoints_active, faults_injected, use_fault_plan
from jaxserve.faults.plan import ALLOW_VARIABLE, KINDS, PLACES, Fault, FaultPlan, InjectedFault, read_fault_plan

__all__ = [
    "ALLOW_VARIABLE",
    "KINDS",
    "PLACES",
    "Fault",
    "FaultPlan",
    "InjectedFault",
    "failpoint",
    "failpoints_active",
    "faults_injected",
    "read_fault_plan",
    "use_fault_plan",
]
