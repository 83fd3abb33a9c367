"""Work of an iteration, counted and not timed: it follows the running requests and not the queue.

Counted are calls and rounds of loops, tables and arrivals included, while slots are full and the queue refills them.
"""

from __future__ import annotations

import pytest

from jaxserve.bench.scheduler import SteadyState, counted_operations
from jaxserve.config.policy_config import POLICIES


def operations_per_iteration(running: int, waiting: int, policy: str, iterations: int) -> float:
    """Mean over iterations in which the slots are full."""
    state = SteadyState(running, waiting, policy=policy)
    state.warm_up()
    with counted_operations() as clock:
        for _ in range(iterations):
            state.step(clock)
        total = clock()
    assert state.mean_running > 0.9 * running and state.scheduler.num_waiting >= waiting
    return total / iterations


@pytest.mark.parametrize("policy", POLICIES)
def test_work_does_not_grow_with_the_queue(policy: str) -> None:
    short = operations_per_iteration(16, 20, policy, iterations=200)
    long = operations_per_iteration(16, 2000, policy, iterations=200)
    # One look at each of those that wait would add 1980.
    assert long < short + 60, f"{short:.0f} operations with 20 waiting, {long:.0f} with 2000"


@pytest.mark.parametrize("policy", POLICIES)
def test_work_grows_at_most_linearly_with_the_running_requests(policy: str) -> None:
    few, more, many = (operations_per_iteration(running, 20, policy, iterations=50) for running in (32, 64, 128))
    # From 64 to 128 it grows twice as much as from 32 to 64; four times if it were quadratic.
    assert many - more < 2.5 * (more - few), f"{few:.0f}, {more:.0f}, {many:.0f} operations with 32, 64, 128 running"
