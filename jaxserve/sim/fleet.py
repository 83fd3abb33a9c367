"""Fleet: several replicas of the simulated engine on one clock, behind the router's own chooser.

    arrival at t ─▶ ReplicaChooser.choose ─▶ the replica's source ─▶ its Simulator
                          ▲ ends ──────────────────────────────────────────┘

Every simulator stops before it moves its clock (`Simulator.turns`). What is earliest of all goes on: an arrival, or the
simulator whose next instant it is; an arrival comes first where both are at one instant, as it does in one simulator.
So what the chooser knows at an arrival is what has ended by then.

The replicas share one log, so figures are of all requests together. A refusal is final: the router's second try after a
429 is not simulated, nor are failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.routing import ReplicaChooser, RouteRequest, RoutingSettings, keys_of_tokens, scope_root
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.request_log import RequestLog
from jaxserve.sim.simulator import MAX_ITERATIONS, SimulationResult, Simulator, Totals
from jaxserve.sim.source import Arrival, Source
from jaxserve.sim.timeline import Timeline


@dataclass(slots=True)
class FleetResult:
    """What a run left.

    Attributes:
      whole: log of all requests, totals summed.
      replicas: each one's, with the shared log.
      routed: requests given to each; choices: how many for which reason.
    """

    whole: SimulationResult
    replicas: list[SimulationResult]
    routed: list[int]
    choices: dict[str, int] = field(default_factory=dict)


class _Feed:
    """The source of one replica: what the chooser gave it."""

    def __init__(self, arrivals: Source) -> None:
        self._arrivals = arrivals
        self.given: deque[Arrival] = deque()

    def peek(self) -> float | None:
        return self.given[0].at if self.given else None

    def take(self) -> Arrival:
        return self.given.popleft()

    def ended(self, now: float, retry_after_s: float | None = None) -> None:
        self._arrivals.ended(now, retry_after_s)


class _Member:
    """A replica on the fleet's clock.

    Attributes:
      next_at: when it goes on; None while it has nothing to do.
    """

    def __init__(self, simulator: Simulator, feed: _Feed) -> None:
        self.simulator = simulator
        self.feed = feed
        self._turns: Iterator[float | None] = simulator.turns()
        self.next_at: float | None = None
        self.go_on()

    def go_on(self) -> None:
        """To just before its next instant."""
        self.next_at = next(self._turns, None)

    def give(self, arrival: Arrival) -> None:
        self.feed.given.append(arrival)
        # One that works takes it up when its plan has ended; one that holds a batch back may be waiting for it.
        if not self.simulator.working:
            self.next_at = arrival.at if self.next_at is None else min(self.next_at, arrival.at)


class Fleet:
    """Runs a workload over several replicas to its end, once.

    Args:
      config: of each replica's scheduler.
      max_iterations: of each replica.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost_model: CostModel,
        source: Source,
        *,
        num_replicas: int,
        routing: RoutingSettings,
        max_iterations: int = MAX_ITERATIONS,
    ) -> None:
        self._config = config
        self._source = source
        self._chooser = ReplicaChooser(num_replicas, routing)
        self._placed: dict[str, tuple[int, RouteRequest]] = {}
        self._choices: dict[str, int] = {}
        self._log = RequestLog()
        self._members = []
        for number in range(num_replicas):
            self._chooser.set_available(number, True)
            feed = _Feed(source)
            simulator = Simulator(
                config, cost_model, feed, max_iterations=max_iterations, on_end=self._ended, log=self._log
            )
            self._members.append(_Member(simulator, feed))

    def run(self) -> FleetResult:
        """Simulates until no request is live or to come, or a replica is at its limit."""
        while True:
            member = min(
                (each for each in self._members if each.next_at is not None),
                key=lambda each: each.next_at or 0.0,
                default=None,
            )
            at = self._source.peek()
            if at is not None and (member is None or member.next_at is None or at <= member.next_at):
                self._place(self._source.take())
            elif member is not None:
                member.go_on()
            else:
                return self._result()

    def _place(self, arrival: Arrival) -> None:
        request = arrival.request
        root = scope_root(request.tenant, request.cache_salt, "")
        keys = keys_of_tokens(root, request.prompt_token_ids)
        route = RouteRequest(keys, request.num_prompt_tokens + request.max_tokens, session=request.cache_salt)
        choice = self._chooser.choose(route)
        assert choice is not None, "every replica of a simulation is available"
        self._choices[choice.reason] = self._choices.get(choice.reason, 0) + 1
        self._chooser.begin(choice.replica, route)
        self._placed[request.request_id] = choice.replica, route
        self._members[choice.replica].give(arrival)

    def _ended(self, request_id: str) -> None:
        self._chooser.end(*self._placed.pop(request_id))

    def _result(self) -> FleetResult:
        results = [member.simulator.result() for member in self._members]
        terminations = [each.termination for each in results]
        whole = SimulationResult(
            self._config,
            termination=max(terminations, key=lambda each: each != "all_terminal"),
            log=self._log,
            timeline=_joined([each.timeline for each in results]),
            totals=_summed([each.totals for each in results]),
        )
        routed = [self._chooser.load(number).routed for number in range(len(results))]
        return FleetResult(whole, results, routed, self._choices)


def fleet_figures(result: FleetResult, objectives: Objectives) -> dict[str, Any]:
    """The figures of all requests, as of one run, and those of the fleet; JSON-able. Shares are means over replicas."""
    found, prompt = figures(result.whole, objectives), sum(result.whole.log.num_prompt)
    return found | {
        "busy_share": found["busy_share"] and found["busy_share"] / len(result.replicas),
        "num_replicas": len(result.replicas),
        "requests_routed": result.routed,
        "choices": result.choices,
        "cached_share": result.whole.totals.cached_tokens / prompt if prompt else None,
    }


def _summed(totals: list[Totals]) -> Totals:
    whole = Totals()
    for each in totals:
        for name in ("iterations", "steps", "slot_steps", "wasted_rows", "tokens", "cached_tokens"):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        for by_class, of in (
            (whole.recomputed_tokens, each.recomputed_tokens),
            (whole.swapped_pages, each.swapped_pages),
        ):
            for name, count in of.items():
                by_class[name] = by_class.get(name, 0) + count
        whole.busy_s += each.busy_s
        whole.ended_at = max(whole.ended_at, each.ended_at)
    return whole


def _joined(timelines: list[Timeline]) -> Timeline:
    """All spans in order of time."""
    whole = Timeline()
    for span in sorted((span for each in timelines for span in each.spans), key=lambda span: span.began_at):
        whole.add(replace(span))
    return whole
