"""Figures of a queue into which more comes than goes out, with a bound and without."""

from __future__ import annotations

from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.figure import COUNT, RATIO, Figure
from jaxserve.sim.lengths_run import slot_config
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of

ARRIVING, SERVED = 8, 2
"""Requests per unit of time, which is an iteration."""
UNITS = 100
BOUND = 32
_NO_BOUND = 1 << 20


def overload() -> list[Figure]:
    """Growth, rejections and waits without and with a bound."""
    surplus = float(ARRIVING - SERVED)
    backlog_s, bounded_s = surplus * UNITS / SERVED, BOUND / SERVED
    return [
        *_figures("no bound", _NO_BOUND, (surplus, 0.0, backlog_s), "backlog at the end over rate served"),
        *_figures(f"bound of {BOUND}", BOUND, (0.0, surplus, bounded_s), "at most: bound over rate served"),
    ]


def _figures(name: str, bound: int, expected: tuple[float, float, float], basis: str) -> list[Figure]:
    arrivals = (
        Arrival(float(at), make_request(f"r{at}.{index}", prompt_of(at * ARRIVING + index, 1), 1), 1, "")
        for at in range(UNITS)
        for index in range(ARRIVING)
    )
    config = slot_config(SERVED, 2, max_queue_requests=bound)
    result = Simulator(config, UnitCost(), TimedSource(arrivals)).run()
    # From the middle on, when a bound has long been reached; until the last arrivals.
    first, last = UNITS // 2, UNITS - 1
    queue = {round(span.began_at): span.queue for span in result.timeline.spans}
    log = result.log
    refused = sum(log.outcome_of(index) == "rejected" and at >= first for index, at in enumerate(log.arrived_at))
    topic = f"{ARRIVING} arrivals against {SERVED} served per unit of time"
    scope = f"iterations; {SERVED} slots; prompt and output of 1 token; {UNITS} units of arrivals"
    half = f"{scope}, the second half"
    growth = (queue[last] - queue[first]) / (last - first)
    longest_wait = figures(result, Objectives())["queue_s"]["max"]
    return [
        Figure(topic, f"queue growth per unit, {name}", growth, RATIO, half, expected[0], "textbook"),
        Figure(topic, f"rejections per unit, {name}", refused / (UNITS - first), RATIO, half, expected[1], "surplus"),
        Figure(topic, f"longest wait in units, {name}", longest_wait, COUNT, scope, expected[2], basis),
    ]
