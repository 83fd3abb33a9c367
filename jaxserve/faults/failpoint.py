"""Failpoints: places that a fault plan may make fail. Without a plan a passage is one comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxserve.faults.plan import Fault, FaultPlan

_active: FaultPlan | None = None


def use_fault_plan(plan: FaultPlan | None) -> None:
    """From now on this process' failpoints follow `plan`; None: nothing fails on purpose."""
    global _active
    _active = plan


def failpoints_active() -> bool:
    """Whether there is a plan: what a place needs to carry out its faults is prepared only then."""
    return _active is not None


def faults_injected() -> Mapping[tuple[str, str], int] | None:
    """Strikes of the plan so far, by place and kind; None without a plan."""
    return None if _active is None else dict(_active.struck)


def failpoint(at: str, *, iteration: int | None = None, request_ids: Iterable[str] = ()) -> Fault | None:
    """Passes the place `at`; see `FaultPlan.strike`.

    Args:
      at: one of `PLACES`.
      iteration: of the plan that is run, where there is one.
      request_ids: that take part.
    """
    return None if _active is None else _active.strike(at, iteration, request_ids)
