"""Split: prefill and decode on engines of their own, and the pages' way between them, simulated.

    arrivals ─▶ prefill engine i ─▶ its link ─▶ decode engine j        long prompts
            └─────────────────────────────────▶ decode engine j        short ones, and those that were refused

Every engine is a `Simulator`: its scheduler, cost model and clock are those of an engine alone. Requests go to the
engines of a kind by turns. Pages leave when the iteration that fills them ends, one request's behind the other's on
their prefill engine's link; when the last have come, the request arrives at its decode engine with all full pages but
the last token's, as it does in service. Nothing comes back from decode to prefill, so all prefill engines are simulated
first; that is why arrivals must not depend on ends.

Left out: what the prefix cache of a decode engine already has is sent all the same; copies to the host on the prefill
side are taken to hide behind its iterations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.core import FinishReason
from jaxserve.scheduler import StepPlan
from jaxserve.sim.cost_model import CostModel
from jaxserve.sim.request_log import LiveRequest
from jaxserve.sim.simulator import MAX_ITERATIONS, SimulationResult, Simulator, Totals
from jaxserve.sim.source import Arrival, Source, TimedSource

TraceSink = Callable[[dict[str, Any]], None]
MakeTrace = Callable[[str, SchedulerConfig], TraceSink | None]
"""Of an engine's name and its settings."""


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a prefill engine and all others.

    Attributes:
      bandwidth: bytes per second that leave a prefill engine.
      latency_s: from the last byte's leaving to the arrival.
      page_bytes: of a page in one group of layers.
    """

    bandwidth: float
    latency_s: float
    page_bytes: float


@dataclass(slots=True)
class SplitTotals:
    """What only a split run has.

    Attributes:
      prefill: sums over the prefill engines.
      sent_requests, sent_pages: that went over links; link_busy_s: seconds in which one carried them, all together.
      transfer_s: of each of these requests, from the end of its prompt's last iteration to its arrival.
      short_prompts, refused_prompts: computed by decode engines themselves.
    """

    num_prefill: int
    num_decode: int
    prefill: Totals = field(default_factory=Totals)
    sent_requests: int = 0
    sent_pages: int = 0
    link_busy_s: float = 0.0
    transfer_s: list[float] = field(default_factory=list)
    short_prompts: int = 0
    refused_prompts: int = 0


class _PrefillEngine(Simulator):
    """Computes prompts, and knows when each one's pages have left."""

    def __init__(
        self, config: SchedulerConfig, cost_model: CostModel, source: Source, link: Link, **others: Any
    ) -> None:
        super().__init__(config, cost_model, source, keep_ids=True, **others)
        self._link = link
        self._free_at = 0.0
        self.busy_s = 0.0
        self.num_pages = 0
        self.left_at: dict[str, float] = {}  # by request: instant at which its last page so far has left
        self.ended_at: dict[str, tuple[float, bool]] = {}  # likewise, with whether its prompt was computed

    def _land(self, plan: StepPlan, decode_tokens: tuple[int, ...], ends_at: float) -> None:
        for move in plan.exports:
            seconds = len(move.page_ids) * self._link.page_bytes / self._link.bandwidth
            self._free_at = max(self._free_at, ends_at) + seconds
            self.busy_s += seconds
            self.num_pages += len(move.page_ids)
            self.left_at[move.request_id] = self._free_at
        super()._land(plan, decode_tokens, ends_at)

    def _log_end(self, live: LiveRequest, reason: FinishReason) -> None:
        super()._log_end(live, reason)
        ids = self._result.log.ids
        assert ids is not None
        self.ended_at[ids[live.index]] = self._now, reason is FinishReason.LENGTH


class Split:
    """Runs a workload over prefill and decode engines, once.

    Args:
      prefill, decode: settings of the engines of a kind, of one page size and one set of groups.
      num_prefill: 0: decode engines do everything, which is the aggregated case.
      num_decode: at least 1.
      min_tokens: prompts with fewer tokens to compute go to decode engines at once.
      make_trace: gives each engine's trace sink, by its name ("prefill0", "decode1").

    Raises:
      ValueError: the kinds do not go together.
    """

    def __init__(
        self,
        prefill: SchedulerConfig,
        decode: SchedulerConfig,
        cost_model: CostModel,
        link: Link,
        *,
        num_prefill: int,
        num_decode: int,
        min_tokens: int = 256,
        max_iterations: int = MAX_ITERATIONS,
        make_trace: MakeTrace = lambda name, config: None,
    ) -> None:
        if (prefill.page_size, prefill.windows) != (decode.page_size, decode.windows):
            raise ValueError("prefill and decode engines must have one page_size and one set of windows")
        self._prefill, self._decode, self._cost_model, self._link = prefill, decode, cost_model, link
        self._min_tokens = max(min_tokens, 1)
        self._max_iterations = max_iterations
        self._make_trace = make_trace
        self._totals = SplitTotals(num_prefill, num_decode)
        self._cut_short = False

    def run(self, source: Source) -> SimulationResult:
        """Simulates until all have ended; the result is that of the decode engines, with times from the first arrival.

        Raises:
          ValueError: arrivals depend on ends.
        """
        arrivals = self._after_prefill(_all_of(source))
        num_decode = self._totals.num_decode
        result = SimulationResult(self._decode, split=self._totals)
        if self._cut_short:
            result.termination = "iteration_limit"
        for number in range(num_decode):
            mine = iter(arrivals[number::num_decode])
            name = f"decode{number}"
            simulator = Simulator(
                self._decode,
                self._cost_model,
                TimedSource(mine),
                trace=self._make_trace(name, self._decode),
                max_iterations=self._max_iterations,
                log=result.log,
            )
            part = simulator.run()
            result.termination = max(
                result.termination, part.termination, key=("all_terminal", "iteration_limit").index
            )
            result.timeline.spans.extend(part.timeline.spans)
            add_totals(result.totals, part.totals)
        return result

    def _after_prefill(self, arrivals: list[Arrival]) -> list[Arrival]:
        """The arrivals at decode engines, in order of time."""
        num_prefill, size = self._totals.num_prefill, self._decode.page_size
        if not num_prefill:
            return arrivals
        counts = [(each.request.num_prompt_tokens - 1) // size * size for each in arrivals]
        remote = [index for index, count in enumerate(counts) if count >= self._min_tokens]
        self._totals.short_prompts = len(arrivals) - len(remote)
        after: list[tuple[float, int, Arrival]] = []
        for number in range(num_prefill):
            mine = remote[number::num_prefill]
            for index, arrival in zip(mine, self._prefilled(number, arrivals, mine, counts), strict=True):
                heapq.heappush(after, (arrival.at, index, arrival))
        chosen = set(remote)
        for index, arrival in enumerate(arrivals):
            if index not in chosen:
                heapq.heappush(after, (arrival.at, index, arrival))
        return [heapq.heappop(after)[2] for _ in range(len(after))]

    def _prefilled(self, number: int, arrivals: list[Arrival], mine: list[int], counts: list[int]) -> Iterator[Arrival]:
        """One prefill engine's requests as they arrive at a decode engine, in the order of `mine`."""
        prompts = [
            replace(
                arrivals[index],
                request=replace(
                    arrivals[index].request,
                    prompt_token_ids=arrivals[index].request.prompt_token_ids[: counts[index]],
                    max_tokens=0,
                    exports_kv=True,
                ),
                num_output_tokens=0,
            )
            for index in mine
        ]
        engine = _PrefillEngine(
            self._prefill,
            self._cost_model,
            TimedSource(iter(prompts)),
            self._link,
            trace=self._make_trace(f"prefill{number}", self._prefill),
            max_iterations=self._max_iterations,
        )
        result = engine.run()
        self._cut_short |= result.termination == "iteration_limit"
        add_totals(self._totals.prefill, result.totals)
        self._totals.sent_pages += engine.num_pages
        self._totals.link_busy_s += engine.busy_s
        for index in mine:
            arrival = arrivals[index]
            ended_at, computed = engine.ended_at.get(arrival.request.request_id, (arrival.at, False))
            if not computed:
                self._totals.refused_prompts += 1
                yield replace(arrival, at=ended_at, asked_at=arrival.at)
                continue
            at = engine.left_at[arrival.request.request_id] + self._link.latency_s
            self._totals.sent_requests += 1
            self._totals.transfer_s.append(at - ended_at)
            request = replace(arrival.request, num_imported_tokens=counts[index], received_at=arrival.at)
            yield replace(arrival, at=at, asked_at=arrival.at, request=request)


def add_totals(into: Totals, more: Totals) -> None:
    """Adds sums of another engine; both ended at the later end."""
    for name in ("iterations", "steps", "slot_steps", "wasted_rows", "tokens", "cached_tokens", "busy_s"):
        setattr(into, name, getattr(into, name) + getattr(more, name))
    for name in ("recomputed_tokens", "swapped_pages"):
        sums = getattr(into, name)
        for service_class, count in getattr(more, name).items():
            sums[service_class] = sums.get(service_class, 0) + count
    into.ended_at = max(into.ended_at, more.ended_at)


def _all_of(source: Source) -> list[Arrival]:
    if not isinstance(source, TimedSource):
        raise ValueError("the workload's arrivals depend on ends (closed_loop); engines of several kinds need instants")
    arrivals = []
    while source.peek() is not None:
        arrivals.append(source.take())
    return arrivals
